"""README, docs/ and Makefile match the code: commands, settings, links, files, examples, figures."""

import json
import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import click
import pytest
from prometheus_client import REGISTRY

import serving.metrics
from components.data.ingest_events import ingest_events
from components.hyper_parameters import BundleParams
from feature_repo.events import EVENT_SCHEMA
from feature_repo.stream.configuration import CONFIG
from feature_repo.stream.kafka import VARIABLES as KAFKA_VARIABLES
from pipelines.drills.catalogue import DRILLS, Drill
from pipelines.drills.report import drill_rows
from serving.api.problems import problem
from serving.errors import InvalidRequest, RankingFailed
from serving.schemas import (
    MAX_BASKET,
    MAX_K,
    REASON_CODES,
    REASONS,
    RUNGS,
    RequestBody,
    Response,
    parse_request,
)
from serving.settings import Settings, variable
from serving.shop.rules_file import SECTIONS, SELECTORS, parse_rules
from tests.docs.reference import commands, program

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]
# Pages that people write: benches write those in docs/figures.
WRITTEN = [page for page in PAGES if page.parent.name != "figures" and page.name != "CHANGELOG.md"]
PROSE = "\n".join(page.read_text(encoding="utf-8") for page in WRITTEN)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------- README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1_200


def test_the_readme_has_an_entry_for_each_reader() -> None:
    for reader in ("data scientist", "CI", "checkout developer", "on-call"):
        assert re.search(rf"^\| {reader} \|.*\]\(docs/[\w/-]+\.md\)", README, re.MULTILINE), reader


def test_the_readme_follows_the_line_in_eleven_rows() -> None:
    stations = re.findall(r"^\| (\w+) \| \[`", README, re.MULTILINE)
    assert " ".join(stations[:11]) == (
        "event feature example model ONNX registry endpoint response log drift retrain"
    )


def test_each_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", config.split("\nnav:")[1]))


# ------------------------------------------------------------------------------ commands and targets

COMMANDS = dict(commands(program()))


def command_lines() -> list[list[str]]:
    """Every call of `reco` in the shell blocks of all pages and in the Makefile, as words."""
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", PROSE, re.DOTALL)) + "\n" + MAKEFILE
    lines = re.findall(
        r"^\s*@?(?:[A-Z_]+=\S+ +)?(?:\.venv/bin/|\$\(BIN\)/)?reco +(.*)$",
        shell.replace("\\\n", " "),
        re.MULTILINE,
    )
    return [re.split(r"#|\|\||&&|[;>]", line)[0].split() for line in lines]


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def test_the_code_blocks_call_reco_as_it_is() -> None:
    lines = command_lines()
    assert len(lines) >= 30
    for words in lines:
        # Options of `reco` itself come before the command: `reco --home DIR run`.
        while words and words[0].startswith("-"):
            assert words[0] in options(program()), words
            words = words[2:]
        called = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len, default=None)
        assert called, f"no command: reco {' '.join(words)}"
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options(COMMANDS[called]), f"reco {' '.join(words)}"


def test_the_text_names_commands_and_options_that_exist() -> None:
    spans = re.findall(r"`reco ([a-z][^`\n]*)`", PROSE)
    assert spans
    for span in spans:
        words = span.split()
        called = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len, default=None)
        if called is None:  # a group, or several commands: `reco bench`
            assert any(path[: len(words)] == tuple(words) for path in COMMANDS), span
            continue
        assert set(re.findall(r"(?<!\S)--[a-z-]+", span)) <= options(COMMANDS[called]), span


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_command_is_in_the_reference_and_explains_itself(path: tuple[str, ...]) -> None:
    assert f"## `reco {' '.join(path)}`" in text_of("reference/commands.md").splitlines()
    command = COMMANDS[path]
    assert command.get_short_help_str(limit=200), f"reco {' '.join(path)} has no help"
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and not p.hidden]
    assert not silent, f"reco {' '.join(path)}: options without help"


def test_each_target_of_the_makefile_explains_itself() -> None:
    explained = set(re.findall(r"^([a-z]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert explained == TARGETS


def test_the_pages_name_only_targets_that_exist() -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", PROSE, re.MULTILINE))
    assert {"run", "serve", "test", "check", "demo", "docs", "setup"} <= named <= TARGETS


# ------------------------------------------------------------------------------- settings and metrics


def settings_names() -> set[str]:
    fields = getattr(Settings, "model_fields", None) or Settings.__dataclass_fields__
    return {variable(name) for name in fields} | set(KAFKA_VARIABLES.values())


@pytest.mark.parametrize("name", sorted(settings_names()))
def test_each_setting_is_in_the_reference_with_a_meaning(name: str) -> None:
    row = re.search(rf"^\| `{name}` \|(.*?)\| (.+) \|$", text_of("reference/settings.md"), re.MULTILINE)
    assert row, f"{name} has no row"
    assert len(row[2].split()) > 1, f"{name} has no meaning"


def test_no_page_names_a_setting_that_is_gone() -> None:
    assert set(re.findall(r"\bRECO_[A-Z_]+[A-Z]\b", PROSE)) - {"RECO_COMPLETE", CONFIG} <= settings_names()


def test_no_page_names_a_metric_that_is_gone() -> None:
    assert serving.metrics.RESPONSES, "its import registers them"
    known = {family.name for family in REGISTRY.collect()}
    named = {name.removesuffix("_total") for name in re.findall(r"`(reco_[a-z_]+)[`{]", PROSE)}
    assert len(named) > 10
    assert named <= known


# ----------------------------------------------------------------------------- request and response


def test_the_request_is_in_the_reference() -> None:
    page = text_of("reference/request.md")
    request, response = page.split("## Response")
    assert set(re.findall(r"^\| `(\w+)` \|", request, re.MULTILINE)) == set(RequestBody.__struct_fields__)
    fields = {
        name for names in re.findall(r"^\| (`.*?) \|", response, re.MULTILINE) for name in names.split(", ")
    }
    assert {f"`{name}`" for name in Response.__struct_fields__} <= fields
    assert f"at most {MAX_BASKET}" in request
    assert f"0 to {MAX_K}" in request


def test_the_refusal_of_the_reference_is_real() -> None:
    [example] = re.findall(r"```json\n(.*?)```", text_of("reference/errors.md"), re.DOTALL)
    with pytest.raises(InvalidRequest) as refused:
        parse_request({"basket": [], "k": -1}, now=0.0, default_id="")
    assert json.loads(example) == problem(422, str(refused.value))


def test_each_rung_and_each_reason_is_explained() -> None:
    ladder = text_of("explanation/ladder.md")
    rungs = [
        name for names in re.findall(r"^\| (`.*?) \|", ladder, re.MULTILINE) for name in names.split(", ")
    ]
    assert [name.strip("`") for name in rungs if name.strip("`") in RUNGS] == list(RUNGS)
    errors, on_call = text_of("reference/errors.md"), text_of("how-to/on-call.md")
    for reason in {*REASONS, RankingFailed.reason}:
        assert re.search(rf"^\|.*`{reason}`.*\|.*\|$", errors, re.MULTILINE), reason
    for reason in set(REASONS) - {"nothing_left"}:
        assert f"`{reason}`" in on_call, f"on-call: {reason}"


def test_the_clients_own_reasons_are_explained() -> None:
    from serving.client import answers

    page = text_of("how-to/ask-from-the-checkout.md")
    own = [value for name, value in vars(answers).items() if name.isupper() and isinstance(value, str)]
    assert len(own) > 5
    assert not [reason for reason in own if f"`{reason}`" not in page]


def test_the_reason_codes_are_explained() -> None:
    page = text_of("reference/request.md")
    assert not [code for code in REASON_CODES if f"`{code}`" not in page]


def test_the_request_of_the_checkout_page_is_a_request() -> None:
    body = re.search(r"-d '(.*?)'", text_of("how-to/ask-from-the-checkout.md"), re.DOTALL)
    assert body
    for instance in json.loads(body[1])["instances"]:
        assert parse_request(instance, now=0.0, default_id="").basket


# ------------------------------------------------------------------------------------ links and files


def prose(page: Path) -> str:
    """A page without its blocks of code, in which # begins a comment."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The words behind # that lead to a heading, on GitHub and on the site alike."""
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        label = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        names.add(re.sub(r"[^\w\- ]", "", label.lower()).replace(" ", "-"))
    return names


def test_headings_become_anchors() -> None:
    page = "# The `reco` command\n## What's new?\n### See [a page](b.md), now\n#no heading\n"
    assert anchors(page) == {"the-reco-command", "whats-new", "see-a-page-now"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(prose(target)), f"{link}: no such heading"


def test_no_page_loads_from_the_network() -> None:
    assert not re.findall(r"!\[[^\]]*\]\((https?:[^)]*)\)", PROSE)
    for picture in (DOCS / "images").glob("*.svg"):
        links = re.findall(r"https?://[^\"' ]*", picture.read_text(encoding="utf-8"))
        assert set(links) <= {"http://www.w3.org/2000/svg"}, picture.name


def test_each_picture_of_the_docs_is_shown() -> None:
    shown = set(re.findall(r"\(\S*images/([\w-]+\.svg)\)", PROSE))
    assert shown == {picture.name for picture in (DOCS / "images").iterdir()}


def test_the_files_that_the_pages_name_exist() -> None:
    named = re.findall(
        r"`((?:feature_repo|serving|components|monitoring|pipelines|tests|infra|requirements)/[\w./]*)`",
        PROSE,
    )
    assert named
    made = {"components/models/two_layers.py", "tests/components/models/test_two_layers.py"}  # by the reader
    assert not [path for path in named if path not in made and not (ROOT / path).exists()]


def test_the_imports_of_the_pages_exist() -> None:
    from importlib import import_module

    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PROSE, re.DOTALL))
    imports = re.findall(r"^from ([\w.]+) import (.*)$", blocks, re.MULTILINE)
    assert imports
    for module, names in imports:
        if module == "components.models.two_layers":  # the reader writes it: tests/test_adding_a_ranker.py
            continue
        here = import_module(module.replace("checkout_recommender_client", "serving.client"))
        assert not [name for name in names.split(", ") if not hasattr(here, name)], module


# --------------------------------------------------------------------------------- rules and purchases


def test_the_rules_of_the_page_are_rules() -> None:
    page = text_of("how-to/own-rules.md")
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example
    rules, problems = parse_rules(example[1])
    assert not problems
    assert {rule.kind for rule in rules} == set(SECTIONS), "there is an example of each"
    assert all(f"`{selector}`" in page for selector in SELECTORS)


def test_the_purchases_of_the_page_keep_the_contract(tmp_path: Path) -> None:
    page = text_of("how-to/own-data.md")
    example = re.search(r"```csv\n(.*?)```", page, re.DOTALL)
    assert example
    (tmp_path / "events.csv").write_text(example[1], encoding="utf-8")
    cut = ingest_events(str(tmp_path), tmp_path / "dataset", max_quarantine_ratio=0, train_until="2026-03-09")
    assert cut == "2026-03-09T00:00:00Z"
    named = set(re.findall(r"`(\w+)`", re.search(r"\| column \| meaning \|.*?\n\n", page, re.DOTALL)[0]))  # type: ignore[index]
    assert set(EVENT_SCHEMA.names) <= named


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", changelog, re.MULTILINE)
    assert metadata("checkout-recommender")["Version"] == version, "installed copy is stale: make setup"


# -------------------------------------------------------------------------------------------- figures

FIGURES = DOCS / "figures"
PAGE = text_of("figures/index.md")


def measured(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return document


def row(label: str) -> list[str]:
    """The cells of the page's table row that begins with a label."""
    found = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)[0]
    return [cell.strip() for cell in found.split("|")]


@pytest.mark.parametrize(
    ("label", "system"),
    [
        ("**as served**", "served"),
        ("history frozen at the cut", "served_frozen_history"),
        ("untrained blend of the next two rows", "blend"),
        ("what this shopper buys, decayed", "personal"),
        ("bought together with the basket", "together"),
        ("two-tower and Faiss alone", "two_tower"),
        ("best sellers of four weeks", "popularity"),
    ],
)
def test_the_quality_on_the_page_was_measured(label: str, system: str) -> None:
    quality = measured("quality")
    found = quality[system] if system in quality else quality["baselines"][system]
    ratios = quality["ratios"].get(system)
    assert row(label) == [
        *(f"{found[metric]:.3f}" for metric in ("ndcg_at_10", "recall_at_20", "hit_ratio_at_10")),
        f"{ratios['ndcg_at_10']:.2f} x" if ratios else "",
    ]


@pytest.mark.parametrize(
    ("label", "arm", "line"),
    [
        ("in process, ten items from the full catalogue", "in_process", "total"),
        ("over HTTP, one request at a time", "http_one_at_a_time", "client"),
    ],
)
def test_the_latency_on_the_page_was_measured(label: str, arm: str, line: str) -> None:
    found = measured("latency")["arms"][arm]["ms"][line]
    assert row(label) == [f"{found[p]:.1f}" for p in ("p50", "p95", "p99")]


def test_the_load_on_the_page_was_measured() -> None:
    load, report = measured("load"), (FIGURES / "load.md").read_text(encoding="utf-8")
    _, verdict, *others = report.split("\n\n")
    [goals] = [part for part in others if part.startswith("| goal |")]
    assert verdict in PAGE, "the sentence that the report begins with"
    assert goals in PAGE, "each goal, those that are missed, too"
    for name, arm in load["arms"].items():
        alone = arm["alone"]
        assert row(f"`{name}`: {arm['what']}") == [
            f"{alone['p50_ms']:.1f}",
            f"{alone['p99_ms']:.1f}" if alone["p99_ms"] else "–",
            f"{arm['capacity']['rate']:.0f}" if arm["capacity"]["rate"] else "none",
            f"{arm['cpu_ms']:.1f}",
            f"{arm['dollars_a_million']:.2f}",
            f"{arm['wh_a_million']:.0f}",
        ]
    p50 = {name: arm["ratio"]["p50_ms"] for name, arm in load["arms"].items() if "ratio" in arm}
    alike = ", ".join(f"`{name}`" for name, against in p50.items() if against["min"] <= 1 <= against["max"])
    says(f"In p50, these arms have rounds on either side of `ours`: {alike}.")


def says(sentence: str) -> None:
    """Fail with the sentence that the figures make if the page does not have it."""
    assert sentence in " ".join(PAGE.split()).replace(" %", "%"), sentence


def test_cached_answers_on_the_page_were_measured() -> None:
    mixed, cache = measured("load-mixed")["arms"], measured("cache")
    assert row("answers a second without") == [f"{mixed['ours']['capacity']['rate']:.0f}"]
    assert row("answers a second with") == [f"{mixed['answer-cache']['capacity']['rate']:.0f}"]
    assert row("hits under that load") == [f"{mixed['answer-cache']['cache']['hit_ratio']:.0%}"]
    level, kept = cache["levels"], cache["answers"]["kept"]
    assert row("hits in the process, weeks after the cut") == [f"{level['process_hit_ratio']:.1%}"]
    assert row("hits in Redis, of the rest") == [f"{level['redis_hit_ratio_of_the_rest']:.1%}"]
    bound = f"bound {kept['bound']:.0%} {'reached' if kept['reached'] else 'missed'}"
    assert row(f"hits that show other items than an answer computed now, of {kept['answers']:,}") == [
        f"{kept['other_items']:,} ({kept['other_items_ratio']:.2%}; {bound})"
    ]
    kinds = {kind: result for kind, result in cache["answers"]["regret"].items() if result["answers"]}
    assert kinds
    for kind, result in kinds.items():
        assert row(f"the same, {kind} shoppers") == [f"{result['other_items_ratio']:.2%}"]


def test_re_ranking_on_the_page_was_measured() -> None:
    found = measured("rerank")
    gains, (low, high) = found["served"]["gains"], found["served"]["ndcg_interval"]
    says(f"On the {found['judged_on']:,} baskets of the other half:")
    assert row("catalogue shown") == [f"{gains['coverage']:+.1%}"]
    assert row("new manufacturers shown") == [f"{gains['new_manufacturers']:+.0%}"]
    assert row("NDCG@10") == [f"{gains['ndcg_at_10']:+.2%} [{low:+.2%}, {high:+.2%}]"]
    default, served = BundleParams(), found["served"]["weights"]
    assert {name: getattr(default, name) for name in served} == {
        **served,
        "novel_slots": (*served["novel_slots"],),
    }


def test_the_retrieval_on_the_page_was_measured() -> None:
    large = measured("retrieval")["catalogues"][0]
    says(
        f"{large['items']:,} synthetic items of {large['dimension']} columns. The goal is "
        f"{large['target_recall']:.0%} of the {large['k']} nearest with a p99 of at most "
        f"{large['target_p99_ms']:g} ms."
    )
    says(f"Reached by: {', '.join(f'`{name}`' for name in large['reached_by']) or 'no type'}.")
    says(f"Too slow to build here: {', '.join(f'`{name}`' for name in large['left_out']) or 'none'}.")
    reaching = [point for point in large["curve"] if point["recall"] >= large["target_recall"]]
    kinds = dict.fromkeys(point["kind"] for point in reaching)
    fastest = [
        min((point for point in reaching if point["kind"] == kind), key=lambda point: point["p99_ms"])
        for kind in kinds
    ]
    assert "flat" in kinds, "the exact scan finds all"
    for point in fastest:
        searched = ", ".join(f"{name} {value}" for name, value in point["search"].items())
        label = f"{point['description']} {searched}".strip()
        cells = [
            f"{point['recall']:.3f}",
            f"{point['p50_ms']:.2f}",
            f"{point['p99_ms']:.2f}",
            f"{point['bytes'] / 1e6:,.0f}",
        ]
        line = f"| {label} | {' | '.join(cells)} |"
        assert line in PAGE.splitlines(), line


def test_batching_on_the_page_was_measured() -> None:
    loads = {load["load"]: load["policies"] for load in measured("batching")["loads"]["ranker"]}
    p99 = {at: {name: arm["p99_ms"] for name, arm in loads[at].items()} for at in (0.5, 0.9)}
    for at, result in p99.items():
        policies = ("one a call", "all that is ready", "steered")
        assert row(f"{at:g} of the capacity") == [f"{result[name]:.1f}" for name in policies]
    pays = all(result["all that is ready"] < result["one a call"] for result in p99.values())
    says(
        f"Joining requests for one call of the ranker {'pays' if pays else 'does not pay'} on this processor."
    )


def test_the_features_on_the_page_were_measured() -> None:
    found = measured("features")
    read, seen, frozen, hard = (found[name] for name in ("online_read", "visible", "frozen", "hard_stream"))
    kills, again, join = found["kills"], found["replay"], found["join"]

    def ms(percentiles: dict[str, float], digits: int) -> str:
        return f"{percentiles['p50']:.{digits}f} / {percentiles['p99']:.{digits}f}"

    assert row("read a shopper's row, session and last items from Redis, ms") == [
        ms(read["ours_ms"], 2),
        ms(read["feast_ms"], 2),
    ]
    assert row("look up 10 features of 500 items in process, ms") == [ms(found["item_features"]["ms"], 3), ""]
    assert row("event published until a request sees it, 1,000 events a second, ms") == [
        ms(seen["ms"], 0),
        "",
    ]
    assert row("longest wait for a Redis that is frozen, ms") == [f"{frozen['frozen']['max_ms']:.1f}", ""]
    assert row("events folded in a second of one core") == [f"{found['fold']['per_core_second']:,}", ""]
    assert row("stream killed at random: state equal to the batch's") == [
        f"{kills['equal']} of {kills['kills']}",
        "",
    ]
    assert row("10,000 events, some poisoned, repeated, late: shoppers equal to the clean batch") == [
        f"{hard['users_equal']} of {hard['users']}, {hard['dead_letters']} letters for {hard['poison']}",
        "",
    ]
    assert row("logged answers computed again: features equal in every bit") == [
        f"{again['equal']:,} of {again['compared']:,}",
        "",
    ]
    assert row("what each basket's shopper was, point in time: s / MiB") == [
        *(f"{join[side]['seconds']:.1f} / {join[side]['mib']:,}" for side in ("ours", "feast")),
    ]


@pytest.mark.parametrize(
    ("label", "ranker"),
    [
        ("the five teachers together", "ensemble"),
        ("gradient boosting, the best teacher", "teacher gradient_boosting"),
        ("student", "student"),
        ("student without teachers", "student without teachers"),
        ("pruned", "pruned"),
        ("pruned, tables in INT4", "pruned, int4"),
        ("**as served**", "served"),
    ],
)
def test_the_compression_on_the_page_was_measured(label: str, ranker: str) -> None:
    rankers = measured("compression")["rankers"]
    whole, found = rankers["ensemble"], rankers[ranker]
    p50 = found["latency_ms"]["500"]["p50"]
    cells = [
        f"{found['ndcg_at_10']:.4f}",
        f"{found['recall_at_20']:.4f}",
        f"{found['bytes'] / 1e3:,.0f}",
        f"{p50:.2f}",
        f"{whole['bytes'] / found['bytes']:.1f} x smaller, "
        f"{whole['latency_ms']['500']['p50'] / p50:.1f} x faster",
    ]
    rows = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert cells in [[cell.strip() for cell in found.split("|")] for found in rows]


def test_the_disappointing_results_on_the_page_were_measured() -> None:
    compression = measured("compression")
    student, pruned = compression["engines"]["student"], compression["engines"]["pruned"]

    def faster(engines: dict[str, Any], variant: str) -> str:
        return f"{engines['torch_eager']['500']['p50'] / engines[variant]['500']['p50']:.2f} x"

    served = compression["certificates"][-2]["variant"]
    says(f"only {faster(student, 'fp32')} as fast as eager PyTorch for the student")
    says(f"it is {faster(pruned, 'fp32')} in float32 and {faster(pruned, served)} in the served form")
    assert pruned["int8_static"]["500"]["p50"] > pruned["fp32"]["500"]["p50"]
    says("INT8 activations are slower than float32")
    kept = {
        name: result["kept"]["ndcg_at_10"] for name, result in compression["tables"].items() if "1/8" in name
    }
    says(f"keeps {kept.pop('1/8, budgeted'):.2%} of NDCG@10 in an eighth of the bytes")
    says(f"keeps {max(kept.values()):.2%}. The difference is noise")


@pytest.mark.parametrize("precision", ["FP16", "INT8", "INT4"])
def test_the_tables_on_the_page_were_measured(precision: str) -> None:
    found = measured("compression")["tables"][precision]
    kept = found["kept"]
    assert row(precision) == [
        f"{found['ratio']:.2f} x",
        f"{kept['ndcg_at_10']:.2%}",
        f"{found['gauc_kept']:.2%}",
    ]


@pytest.mark.parametrize(("label", "variant"), [("FP16", "fp16"), ("INT8", "int8"), ("INT4", "int4")])
def test_the_scale_on_the_page_was_measured(label: str, variant: str) -> None:
    found = measured("scale")["variants"][variant]
    assert row(f"{label}, 2 M items") == [
        f"{found['parent_bytes'] / found['bytes']:.2f} x",
        f"{found['ndcg_at_10']['ratio']:.2%}",
        f"{found['auc']['ratio']:.2%}",
    ]


def test_the_memory_on_the_page_was_measured() -> None:
    steps = measured("scale")["steps"]
    most = max(step["gib"] for step in steps)
    minutes = sum(step["seconds"] for step in steps) / 60
    assert f"in {minutes:.0f} minutes and at most {most:.1f} GiB" in " ".join(PAGE.split())


def test_the_drift_on_the_page_was_measured() -> None:
    alarms = {
        week["week"]
        for week in measured("drift")["weeks"]
        if week["column"] == "category" and week["status"] == "alarm"
    }
    [said] = re.findall(r"Alarms in the weeks of: ([^.]*)\.", PAGE)
    assert set(re.findall(r"\d{4}-\d\d-\d\d", said)) == alarms


def test_the_headline_of_the_readme_was_measured() -> None:
    quality, load, compression = measured("quality"), measured("load"), measured("compression")["rankers"]
    ours, drills, replay = load["arms"]["ours"], measured("drills")["drills"], measured("features")["replay"]
    calls = [drill["all"]["client"] for drill in drills.values()]
    whole, served = compression["ensemble"], compression["served"]
    faster = whole["latency_ms"]["500"]["p50"] / served["latency_ms"]["500"]["p50"]
    section = README[README.index("<!-- generated: headline") : README.index("<!-- end of headline")]
    assert re.findall(r"^\| .*? \| (.*) \|$", section, re.MULTILINE)[1:] == [
        f"{quality['served']['ndcg_at_10']:.3f}, "
        f"{quality['ratios']['blend']['ndcg_at_10']:.2f} x the untrained blend",
        f"{ours['alone']['p50_ms']:.1f} / {ours['alone']['p99_ms']:.1f} ms",
        f"{ours['capacity']['rate']:.0f}",
        f"{whole['bytes'] / served['bytes']:.0f} x smaller, {faster:.0f} x faster",
        f"{replay['equal']:,} of {replay['compared']:,}",
        f"{sum(call['failed'] for call in calls)} of {sum(call['requests'] for call in calls):,}",
        f"{sum(drill['passed'] for drill in drills.values())} of {len(drills)}",
        f"{sum(goal['reached'] is True for goal in load['goals'])} of {len(load['goals'])}",
    ]


# --------------------------------------------------------------------------------------------- drills

DRILL_PAGE = text_of("reference/drills.md")


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_each_drill_is_on_the_page_with_its_proof(drill: Drill) -> None:
    assert f"| `{drill.name}` | {drill.proves} | {', '.join(drill.breaks)} |" in DRILL_PAGE.splitlines()


def test_the_drills_on_the_page_were_carried_out() -> None:
    result = measured("drills")
    assert "\n".join(drill_rows(result)) in DRILL_PAGE
    assert set(result["drills"]) == {drill.name for drill in DRILLS}
    assert not result["broken_off"]
    calls = [drill["all"]["client"] for drill in result["drills"].values()]
    requests, failed, late = (sum(call[name] for call in calls) for name in ("requests", "failed", "late"))
    says(f"Of {requests:,} calls of the client {failed} failed and {late} came late.")
    missed = [f"`{name}`" for name, drill in result["drills"].items() if not drill["passed"]]
    says(f"Missed: {', '.join(missed) or 'none'}.")
