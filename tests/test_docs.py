"""README and Makefile -> are they true: commands, options, targets, settings, links and files exist."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import click
import pytest

from components.data.ingest_events import ingest_events
from components.release.assemble_bundle import BundleParams
from feature_repo.events import EVENT_SCHEMA
from feature_repo.stream.kafka import VARIABLES as KAFKA_VARIABLES
from feature_repo.stream.kafka import KafkaSettings
from pipelines.cli.shell import main
from pipelines.drills.catalogue import DRILLS, Drill
from pipelines.drills.report import drill_rows
from serving.schemas import parse_request
from serving.settings import Settings, variable
from serving.shop.rules_file import SECTIONS, SELECTORS, parse_rules

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]


def commands(
    group: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Each command of `reco` with the words that call it, groups opened."""
    if not isinstance(group, click.Group) or group.invoke_without_command:
        yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for word in group.list_commands(context):
            command = group.get_command(context, word)
            assert command is not None, word
            yield from commands(command, (*path, word))


COMMANDS = dict(commands(main))


def command_lines() -> list[list[str]]:
    """Every call of `reco` in the README's and the Makefile's code, as words."""
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)) + "\n" + MAKEFILE
    lines = re.findall(
        r"^\s*@?(?:\.venv/bin/|\$\(BIN\)/)?reco +(.*)$", shell.replace("\\\n", " "), re.MULTILINE
    )
    return [re.split(r"#|\|\||&&|[;>]", line)[0].split() for line in lines]


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def test_the_code_blocks_call_reco_as_it_is() -> None:
    lines = command_lines()
    assert len(lines) >= 5
    for words in lines:
        # Options of `reco` itself come before the command: `reco --home DIR run`.
        while words and words[0].startswith("-"):
            assert words[0] in options(main), words
            words = words[2:]
        called = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len, default=None)
        assert called, f"no command: reco {' '.join(words)}"
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options(COMMANDS[called]), f"reco {' '.join(words)}"


def test_the_table_of_commands_names_options_that_exist() -> None:
    rows = re.findall(r"^\| `reco ([a-z]+(?: [a-z]+)?)\b[^|]*\|[^|]*\|$", README, re.MULTILINE)
    assert len(rows) >= len(COMMANDS)
    for row in re.findall(r"^\| `reco [^|]*\|[^|]*\|$", README, re.MULTILINE):
        words = row.split("`")[1].split()[1:]
        called = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len)
        assert set(re.findall(r"--[a-z-]+", row)) <= options(COMMANDS[called]), row


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_command_stands_in_the_readme_and_explains_itself(path: tuple[str, ...]) -> None:
    assert re.search(rf"^\| `reco {' '.join(path)}[` ]", README, re.MULTILINE)
    command = COMMANDS[path]
    assert command.get_short_help_str(limit=200), f"reco {' '.join(path)} has no help"
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and not p.hidden]
    assert not silent, f"reco {' '.join(path)}: options without help"


def test_each_target_of_the_makefile_explains_itself() -> None:
    explained = set(re.findall(r"^([a-z]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert explained == TARGETS


def test_the_readme_names_only_targets_that_exist() -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE))
    assert {"run", "serve", "test", "check", "demo"} <= named <= TARGETS


SETTINGS = {variable(field.name): field for field in fields(Settings)} | {
    KAFKA_VARIABLES[field.name]: field for field in fields(KafkaSettings)
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_stands_in_the_readme_with_its_default(name: str) -> None:
    row = re.search(rf"^\| `{name}` \|(.*?)\| (.+) \|$", README, re.MULTILINE)
    assert row, f"{name} has no row in README's table of settings"
    default = SETTINGS[name].default
    assert row[1].strip("` ").replace(" ", "") == shown(default), f"{name}: {default!r}"


def shown(default: object) -> str:
    """A default as the README writes it: a switch is on or off, nothing is nothing, 50.0 is 50."""
    match default:
        case None:
            return ""
        case bool():
            return "on" if default else "off"
        case float():
            return f"{default:g}"
        case _:
            return str(default)


def test_the_readme_names_no_setting_that_is_gone() -> None:
    assert set(re.findall(r"RECO_[A-Z_]+", README)) <= set(SETTINGS)


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """A page without its blocks of code, in which # begins a comment."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What can stand behind # in a link: headings as GitHub spells them, numbered where they repeat."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        anchor = re.sub(r"[^\w\- ]", "", said.lower()).replace(" ", "-")
        numbered = (f"{anchor}-{number}" if number else anchor for number in itertools.count())
        found.add(next(name for name in numbered if name not in found))
    return found


def test_headings_become_the_anchors_that_github_makes() -> None:
    page = "# The `reco` command\n## What's new?\n## What's new?\n### See [a page](b.md), now\n#no heading\n"
    assert anchors(page) == {"the-reco-command", "whats-new", "whats-new-1", "see-a-page-now"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(prose(target)), f"{link}: no such heading"


def test_the_files_that_the_readme_names_exist() -> None:
    named = re.findall(
        r"`((?:feature_repo|serving|components|monitoring|pipelines|tests|infra)/[\w./]*)`", README
    )
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_request_of_the_readme_is_a_request() -> None:
    body = re.search(r"-d '(.*?)'", README, re.DOTALL)
    assert body
    for instance in json.loads(body[1])["instances"]:
        assert parse_request(instance, now=0.0, default_id="").basket


def test_the_rules_of_the_readme_are_rules() -> None:
    example = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert example
    rules, problems = parse_rules(example[1])
    assert not problems
    assert {rule.kind for rule in rules} == set(SECTIONS), "there is an example of each"
    assert all(f"`{selector}`" in README for selector in SELECTORS)


def test_the_purchases_of_the_readme_keep_the_contract(tmp_path: Path) -> None:
    example = re.search(r"```csv\n(.*?)```", README, re.DOTALL)
    assert example
    (tmp_path / "events.csv").write_text(example[1], encoding="utf-8")
    cut = ingest_events(str(tmp_path), tmp_path / "dataset", max_quarantine_ratio=0, train_until="2026-03-09")
    assert cut == "2026-03-09T00:00:00Z"
    named = set(re.findall(r"`(\w+)`", re.search(r"\| column \| meaning \|.*?\n\n", README, re.DOTALL)[0]))  # type: ignore[index]
    assert set(EVENT_SCHEMA.names) <= named


def test_the_changelog_tells_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", changelog, re.MULTILINE)
    assert metadata("checkout-recommender")["Version"] == version, "installed copy is stale: make setup"


# -------------------------------------------------------------------------------------------- figures

FIGURES = ROOT / "docs" / "figures"


def measured(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return document


def row(label: str) -> list[str]:
    """The cells of the README's table row that begins with a label."""
    found = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", README, re.MULTILINE)[0]
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
def test_the_quality_in_the_readme_was_measured(label: str, system: str) -> None:
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
def test_the_latency_in_the_readme_was_measured(label: str, arm: str, line: str) -> None:
    found = measured("latency")["arms"][arm]["ms"][line]
    assert row(label) == [f"{found[p]:.1f}" for p in ("p50", "p95", "p99")]


def test_the_load_in_the_readme_was_measured() -> None:
    load, report = measured("load"), (FIGURES / "load.md").read_text(encoding="utf-8")
    _, verdict, *others = report.split("\n\n")
    [goals] = [part for part in others if part.startswith("| goal |")]
    assert verdict in README.replace("\n", " "), "the sentence that the report begins with"
    assert goals in README, "each goal, those that are missed, too"
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
    tells(f"in p50, rounds on either side of `ours` have {alike}.")


def tells(sentence: str) -> None:
    """Fail with the sentence that the figures make if the README does not hold it."""
    assert sentence in " ".join(README.split()).replace(" %", "%"), sentence


def test_kept_answers_in_the_readme_were_measured() -> None:
    mixed, cache = measured("load-mixed")["arms"], measured("cache")
    rates = [mixed[name]["capacity"]["rate"] for name in ("answer-cache", "ours")]
    tells(
        f"one process that keeps answers gives {rates[0]:.0f} answers a second instead of {rates[1]:.0f}, "
        f"{mixed['answer-cache']['cache']['hit_ratio']:.0%} of them kept ones"
    )
    level, kept = cache["levels"], cache["answers"]["kept"]
    tells(
        f"{level['process_hit_ratio']:.1%} of questions hit in the process and "
        f"{level['redis_hit_ratio_of_the_rest']:.1%} of the rest in Redis"
    )
    kinds = {kind: found for kind, found in cache["answers"]["regret"].items() if found["answers"]}
    shares = ", ".join(f"{kind} shoppers' {found['other_items_ratio']:.2%}" for kind, found in kinds.items())
    tells(
        f"of all {kept['answers']:,} hits {kept['other_items']:,}, {kept['other_items_ratio']:.2%}, show "
        f"other items than an answer computed now ({shares}): the bound of {kept['bound']:.0%} is "
        f"{'reached' if kept['reached'] else 'missed'}"
    )


def test_re_ranking_in_the_readme_was_measured() -> None:
    found = measured("rerank")
    gains, (low, high) = found["served"]["gains"], found["served"]["ndcg_interval"]
    tells(
        f"on the {found['judged_on']:,} baskets of the other half that is {gains['coverage']:+.1%} and "
        f"{gains['new_manufacturers']:+.0%} for {gains['ndcg_at_10']:+.2%} of NDCG@10 "
        f"[{low:+.2%}, {high:+.2%}]"
    )
    default, served = BundleParams(), found["served"]["weights"]
    assert {name: getattr(default, name) for name in served} == {
        **served,
        "novel_slots": (*served["novel_slots"],),
    }


def test_the_retrieval_in_the_readme_was_measured() -> None:
    large = measured("retrieval")["catalogues"][0]
    tells(
        f"On {large['items']:,} synthetic items of {large['dimension']} columns, "
        f"{large['target_recall']:.0%} of the {large['k']} nearest "
        f"with a p99 of at most {large['target_p99_ms']:g} ms is reached by "
        f"{', '.join(large['reached_by']) or 'no type'}"
    )
    tells(f"Too slow to build here: {', '.join(large['left_out']) or 'none'}")
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
        assert line in README.splitlines(), line


def test_batching_in_the_readme_was_measured() -> None:
    loads = {load["load"]: load["policies"] for load in measured("batching")["loads"]["ranker"]}
    p99 = {at: {name: arm["p99_ms"] for name, arm in loads[at].items()} for at in (0.5, 0.9)}
    pays = all(found["all that is ready"] < found["one a call"] for found in p99.values())
    figures = ", and ".join(
        f"at {at:g} of the capacity it is {found['one a call']:.1f} ms with one call each, "
        f"{found['all that is ready']:.1f} with all joined that is ready, {found['steered']:.1f} as steered"
        for at, found in p99.items()
    )
    tells(
        f"Joining requests for one call of the ranker {'pays' if pays else 'does not pay'} on this "
        f"processor, by the p99 of ranking: {figures}"
    )


def test_the_features_in_the_readme_were_measured() -> None:
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
def test_the_compression_in_the_readme_was_measured(label: str, ranker: str) -> None:
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
    rows = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", README, re.MULTILINE)
    assert cells in [[cell.strip() for cell in found.split("|")] for found in rows]


def test_what_disappoints_in_the_readme_was_measured() -> None:
    found, said = measured("compression"), " ".join(README.split())
    student, pruned = found["engines"]["student"], found["engines"]["pruned"]

    def faster(engines: dict[str, Any], variant: str) -> str:
        return f"{engines['torch_eager']['500']['p50'] / engines[variant]['500']['p50']:.2f} x"

    served = found["certificates"][-2]["variant"]
    assert f"only {faster(student, 'fp32')} as fast as eager PyTorch for the student" in said
    assert f"{faster(pruned, 'fp32')} for the pruned one in float32 ({faster(pruned, served)} in the" in said
    assert pruned["int8_static"]["500"]["p50"] > pruned["fp32"]["500"]["p50"]
    kept = {name: row["kept"]["ndcg_at_10"] for name, row in found["tables"].items() if "1/8" in name}
    assert f"keeps {kept.pop('1/8, budgeted'):.2%} of NDCG@10 in an eighth of the bytes" in said.replace(
        " %", "%"
    )
    assert f"keeps {max(kept.values()):.2%}: the difference is noise" in said.replace(" %", "%")


@pytest.mark.parametrize("precision", ["FP16", "INT8", "INT4"])
def test_the_tables_in_the_readme_were_measured(precision: str) -> None:
    found = measured("compression")["tables"][precision]
    kept = found["kept"]
    assert row(precision) == [
        f"{found['ratio']:.2f} x",
        f"{kept['ndcg_at_10']:.2%}",
        f"{found['gauc_kept']:.2%}",
    ]


@pytest.mark.parametrize(("label", "variant"), [("FP16", "fp16"), ("INT8", "int8"), ("INT4", "int4")])
def test_the_scale_in_the_readme_was_measured(label: str, variant: str) -> None:
    found = measured("scale")["variants"][variant]
    assert row(f"{label}, 2 M items") == [
        f"{found['parent_bytes'] / found['bytes']:.2f} x",
        f"{found['ndcg_at_10']['ratio']:.2%}",
        f"{found['auc']['ratio']:.2%}",
    ]


def test_the_memory_in_the_readme_was_measured() -> None:
    steps = measured("scale")["steps"]
    most = max(step["gib"] for step in steps)
    minutes = sum(step["seconds"] for step in steps) / 60
    assert f"in {minutes:.0f} minutes and at most {most:.1f} GiB" in " ".join(README.split())


def test_the_drift_in_the_readme_was_measured() -> None:
    alarms = {
        week["week"]
        for week in measured("drift")["weeks"]
        if week["column"] == "category" and week["status"] == "alarm"
    }
    [said] = re.findall(r"alarms in the weeks of ([^:]*):", README)
    assert set(re.findall(r"\d{4}-\d\d-\d\d", said)) == alarms


# --------------------------------------------------------------------------------------------- drills


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_each_drill_stands_in_the_readme_with_what_it_proves(drill: Drill) -> None:
    assert f"| `{drill.name}` | {drill.proves} |" in README.splitlines()


def test_the_drills_in_the_readme_were_carried_out() -> None:
    found = measured("drills")
    assert "\n".join(drill_rows(found)) in README
    assert set(found["drills"]) == {drill.name for drill in DRILLS}
    assert not found["broken_off"]
    calls = [drill["all"]["client"] for drill in found["drills"].values()]
    asked, failed = (sum(one[name] for one in calls) for name in ("requests", "failed"))
    assert f"of {asked:,} calls of the client {failed} failed" in " ".join(README.split())
    missed = [name for name, drill in found["drills"].items() if not drill["passed"]]
    told = README[README.index("What was missed") : README.index("| drill | failed")]
    assert re.findall(r"`([a-z-]+)`", told) == missed
