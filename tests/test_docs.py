"""README, docs/ and Makefile match the code: commands, settings, links, files, examples, figures."""

import json
import re
import subprocess
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
from monitoring.gauges import WatchGauges
from pipelines.drills.catalogue import DRILLS
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
from tests.docs.figures import FASTER, FULL, PUBLISHED, REMOVED, disagreements, measured, older, older_results
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
WRITTEN = [page for page in PAGES if page.parent != DOCS / "figures" and page.name != "CHANGELOG.md"]
PROSE = "\n".join(page.read_text(encoding="utf-8") for page in WRITTEN)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------- README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1_200


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
        r"^\s*@?(?:[A-Z_]+=\S+ +)?(?:\.venv/bin/)?reco +(.*)$",
        re.sub(r"\$\([^()]*\)", "$", shell.replace("\\\n", " ").replace("$(BIN)/", ".venv/bin/")),
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


def test_each_target_of_the_makefile_explains_itself() -> None:
    explained = set(re.findall(r"^([a-z]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert explained == TARGETS


def test_the_pages_name_only_targets_that_exist() -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", PROSE, re.MULTILINE))
    assert {"run", "serve", "test", "check", "demo", "docs", "setup"} <= named <= TARGETS


# ------------------------------------------------------------------------------- settings and metrics


def settings_names() -> set[str]:
    return {variable(name) for name in Settings.__dataclass_fields__} | set(KAFKA_VARIABLES.values())


def test_no_page_names_a_setting_that_is_gone() -> None:
    assert set(re.findall(r"\bRECO_[A-Z_]+[A-Z]\b", PROSE)) - {"RECO_COMPLETE", CONFIG} <= settings_names()


def test_no_page_names_a_metric_that_is_gone() -> None:
    assert serving.metrics.RESPONSES, "its import registers them"
    known = {family.name for family in [*REGISTRY.collect(), *WatchGauges().registry.collect()]}
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

# The page and the README's table are generated from the result files; tests/docs/test_generate.py compares.


def state(**changes: Any) -> dict[str, Any]:
    """A result as `make figures` writes it."""
    found = {
        "busy": {},
        "commit": "abcdef1",
        "bundle_id": "b1",
        "machine": {"cpu": "A processor"},
        "measured_at": "2026-02-02",
    }
    return {**found, **changes}


def test_results_of_one_commit_that_disagree_are_refused() -> None:
    later = {"commit": "1234567", "measured_at": "2026-03-03"}
    silent = {name: value for name, value in state().items() if name != "busy"}
    assert disagreements({"one": state(), "of no bundle": state(bundle_id=None)}) == []
    assert disagreements({"one": state(), "two": state(bundle_id="b2")}) == ["abcdef1, bundle: b1, b2"]
    other = state(machine={"cpu": "Another"})
    assert disagreements({"one": state(), "two": other}) == ["abcdef1, processor: A processor, Another"]
    assert disagreements({"one": state(commit="abcdef1+")}) == ["abcdef1+: not a commit"]
    assert disagreements({"one": silent}) == ["without the state of the machine: one"]
    old, new = {"one": silent}, {"two": state(**later, bundle_id="b2")}
    assert disagreements(old | new) == [], "an older result need not have it, and is of its own commit"
    assert (older(old | new), older(new)) == (["one"], [])


def test_the_published_results_agree() -> None:
    assert disagreements({name: measured(name) for name in PUBLISHED}) == []


@pytest.mark.slow  # starts git
def test_the_published_results_are_of_this_history() -> None:
    def git(*words: str) -> int:
        return subprocess.run(["git", "-C", str(ROOT), *words], check=False, capture_output=True).returncode

    for name in PUBLISHED:
        commit = measured(name)["commit"]
        # An older result may be of a commit that this history does not hold.
        if name in older_results() and git("cat-file", "-e", f"{commit}^{{commit}}") != 0:
            continue
        assert git("merge-base", "--is-ancestor", commit, "HEAD") == 0, name
    for commit in (measured(FASTER)["commit"], *(run["commit"] for run in measured(FULL)["runs"].values())):
        assert git("merge-base", "--is-ancestor", commit, "HEAD") == 0, commit


def test_each_figure_of_the_folder_has_a_place_on_the_page() -> None:
    files = {file.stem for file in (DOCS / "figures").glob("*.json")}
    assert files == {*PUBLISHED, *REMOVED, FASTER, FULL}


def test_the_weights_that_were_judged_are_the_defaults() -> None:
    default, served = BundleParams(), measured("rerank")["served"]["weights"]
    assert {name: getattr(default, name) for name in served} == {
        **served,
        "novel_slots": (*served["novel_slots"],),
    }


def test_the_published_drills_exist_and_ran_to_their_end() -> None:
    """`tests/docs/generate.py` writes the page of drills from the same result and catalogue."""
    result = measured("drills")
    assert set(result["drills"]) <= {drill.name for drill in DRILLS}
    assert not result["broken_off"]
