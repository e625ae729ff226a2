"""Rules of the source tree that import-linter cannot check: thin steps, light imports."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.distributions import canonical, declared
from tests.docs.source import tree

ROOT = Path(__file__).parents[1]
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
STEPS = [path for path in MODULES if path.name == "steps.py"]

TOUCHES_ENVIRONMENT = {
    "feature_repo/stream/configuration.py": "reads settings, once, when a process starts",
    "serving/stages/onnx_runtime.py": "switches ONNX Runtime's telemetry off before it imports it",
    "serving/server.py": "names the allocator of Arrow before that is loaded",
    "serving/metrics.py": "reads where prometheus_client keeps the counters of several processes",
    "serving/settings.py": "reads the home before anything else, and finds misspelt variables",
    "pipelines/cli/shell.py": "reads RECO_HOME",
    "pipelines/run/step_process.py": "hands its variables on to the steps, and says how their threads wait",
    "pipelines/run/step_server.py": "sets the threads of a step, where the environment does not",
    "components/release/examination.py": "passes a few variables on to its child process",
    "pipelines/drills/bad_endpoint.py": "sees from the log's folder whether its slot is the shadow",
    "components/release/registry.py": "sets MLflow's own switches before it imports MLflow",
}
# Package markers hold no logic to test.
WITHOUT_TESTS = {"__init__.py"}
# Part of the feature repository, but never of the endpoint: Feast's objects and the broker's clients.
NOT_SERVED = {
    "feature_repo/stream/dead_letters.py",
    "feature_repo/stream/delivery.py",
    "feature_repo/stream/fact_stream.py",
    "feature_repo/feature_definitions.py",
    "feature_repo/stream/kafka.py",
    "feature_repo/stream/online_rows.py",
    "feature_repo/stream/replay_events.py",
    "feature_repo/stream/stream.py",
}
# Calls that execute a text, or make any object from it.
RUN_TEXT = {
    *("eval", "exec", "compile", "os.system", "os.popen"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load"),
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def body(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) else function.body


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Each call in the file with the dotted name it calls."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def imported(path: Path) -> set[str]:
    """The top-level names of everything that the file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


# ------------------------------------------------------------------------------------------- the files


def test_each_module_has_a_docstring() -> None:
    """One line at the top: its input and its output."""
    assert not [name(path) for path in MODULES if not ast.get_docstring(tree(path))]


def test_each_module_has_its_test_module() -> None:
    missing = []
    for path in MODULES:
        package, *folders, file = path.relative_to(ROOT).parts
        expected = ROOT.joinpath("tests", package, *folders, f"test_{file}")
        if file not in WITHOUT_TESTS and not expected.exists():
            missing.append(expected.relative_to(ROOT).as_posix())
    assert not missing


def test_no_folder_holds_more_than_fourteen_modules() -> None:
    folders = Counter(
        path.parent for path in MODULES if path.name != "__init__.py" and "_pb2" not in path.name
    )
    assert not {name(folder): count for folder, count in folders.items() if count > 14}


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    lengths = {name(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert not {module: length for module, length in lengths.items() if length > 500}


def test_a_class_name_exists_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        if "_pb2" not in path.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [kind for kind, count in names.items() if count > 1]


def test_no_module_has_a_catch_all_name() -> None:
    drawers = {"utils.py", "common.py", "helpers.py", "base.py", "manager.py", "core.py"}
    assert not [name(path) for path in MODULES if path.name in drawers]


def test_packages_export_nothing() -> None:
    """A package that imported its steps would fail inside a step, where KFP hides its decorators."""
    packages = [path for path in MODULES if path.name == "__init__.py" and path.parent.name != "client"]
    assert not [name(path) for path in packages if imported(path)]


def test_no_module_executes_its_input() -> None:
    """Pickles execute code: no module reads or writes one, numpy's and torch's included."""
    found = [
        name(path)
        for path in MODULES
        if imported(path) & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    ]
    for path in MODULES:
        for called, node in calls(path):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if keywords.get("allow_pickle", "False") != "False":
                found.append(f"{name(path)}:{node.lineno} allow_pickle")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                found.append(f"{name(path)}:{node.lineno} torch.load without weights_only=True")
            if called in RUN_TEXT or keywords.get("shell", "False") != "False":
                found.append(f"{name(path)}:{node.lineno} {called} runs text")
    assert not found


def test_only_listed_modules_read_the_environment() -> None:
    names = {"os.environ", "os.environb", "os.getenv"}
    found = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if name(path) not in TOUCHES_ENVIRONMENT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    ]
    assert not found


def test_onnx_runtime_is_loaded_in_one_place() -> None:
    """Its telemetry must be off before: elsewhere only functions may import parts of the library."""
    found = [
        name(path)
        for path in MODULES
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.match(r"(from|import) onnxruntime\b", ast.unparse(node))
    ]
    assert found == ["serving/stages/onnx_runtime.py"]


def test_no_file_refers_to_places_outside_the_repository() -> None:
    """A clone has only committed files: no path above the root, no machine's own folder, no stray index."""
    words = re.compile(
        r"\.\./shared|/work/|file:///|/opt/(pypi|wheels)|https?://[^\s\"')]*(pypi|artifactory|nexus)"
    )
    files = [*MODULES, ROOT / "Makefile"]
    files += [file for pattern in ("*.md", "*.toml", "requirements/*") for file in ROOT.glob(pattern)]
    files += [
        *(ROOT / ".ci").iterdir(),
        *(ROOT / ".github").rglob("*.yml"),
        *(ROOT / "feature_repo").glob("*.yaml"),
    ]
    found = [
        f"{name(path)}: {match[0]}" for path in files for match in words.finditer(path.read_text("utf-8"))
    ]
    assert not found


# ------------------------------------------------------------------------------------------- the steps


def decorated(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if function.decorator_list]


@pytest.mark.parametrize("path", STEPS, ids=name)
def test_a_step_only_calls_its_function_which_has_its_name(path: Path) -> None:
    """Only the decorated function's own source reaches the cluster: logic inside it would go untested."""
    steps = decorated(path)
    assert steps, f"{name(path)} holds no step"
    for step in steps:
        statements = [s for s in body(step) if not isinstance(s, ast.Import | ast.ImportFrom)]
        owners = [
            s
            for s in body(step)
            if isinstance(s, ast.ImportFrom) and (s.module or "").split(".")[0] in PACKAGES
            # They show the result, and name the keys that the gate trusts.
            if s.module not in {"components.pages", "components.release.step_runs", "serving.settings"}
        ]
        assert len(owners) == 1, f"{name(path)}: {step.name} imports {len(owners)} modules of ours, not one"
        names = {alias.name for alias in owners[0].names}
        assert step.name in names, f"{name(path)}: {step.name} calls {names}"
        assert len(statements) <= 2, (
            f"{name(path)}: {step.name} has {len(statements)} statements, at most two"
        )


# ----------------------------------------------------------------------------------------- the libraries


def test_each_library_is_declared() -> None:
    """The endpoint's imports are base dependencies; others may come from the extra `train`."""
    owners = packages_distributions()
    ours = set(sys.stdlib_module_names) | set(PACKAGES)
    missing = []
    for path in MODULES:
        allowed = declared("cpu", "trace") if is_served(path) else declared("cpu", "train", "stream")
        allowed |= {"httpx"} if "client" in path.parts else set()
        allowed |= declared("dev") if "bench" in path.parts else set()  # peers of a clone, not of a user
        for library in imported(path) - ours:
            if not {canonical(owner) for owner in owners.get(library, [library])} & allowed:
                missing.append(f"{name(path)}: {library}")
    assert not missing


def test_the_client_needs_httpx_alone() -> None:
    """The contract of import-linter names forbidden packages; this names the allowed ones."""
    modules = list((ROOT / "serving" / "client").glob("*.py"))
    assert len(modules) > 3
    for path in modules:
        assert imported(path) <= {*sys.stdlib_module_names, "httpx"}, name(path)


def test_each_push_runs_the_tests_once() -> None:
    """`make test` holds the fast lane; so the other workflow runs the part of `make check` without tests."""
    workflows = ROOT / ".github" / "workflows"
    runs = {
        file.stem: set(re.findall(r"- run: make (\w+)$", file.read_text(encoding="utf-8"), re.MULTILINE))
        for file in workflows.glob("*.yml")
    }
    assert runs["check"] == {"lint"}
    assert [name for name, targets in runs.items() if targets & {"test", "check"}] == ["test"]


def is_served(path: Path) -> bool:
    """Whether the endpoint's image holds what this module needs."""
    return path.parts[len(ROOT.parts)] in {"serving", "feature_repo"} and name(path) not in NOT_SERVED


HEAVY = {"torch", "kfp", "mlflow", "evidently", "feast", "onnx", "kserve", "pandas", "duckdb", "matplotlib"}
HEAVY |= {"numba"}  # it compiles and loads loops
HEAVY |= {"confluent_kafka"}  # the endpoint's image has none


def loaded_by(module: str, **environment: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `import module`."""
    program = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "may_load"),
    [
        ("serving.answer.recommender", {"numba"}),
        ("serving.schemas", set()),
        ("feature_repo.stream.kafka", set()),
        ("pipelines.cli.shell", set()),
        ("components.rollout.release", {"pandas", "numba"}),
        ("serving.api.transformer", {"kserve", "pandas", "numba"}),  # kserve itself brings pandas
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_light_module_stays_light(module: str, may_load: set[str]) -> None:
    assert not loaded_by(module) & (HEAVY - may_load)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["components", "monitoring"])
def test_plain_modules_import_under_the_kfp_runtime(package: str) -> None:
    """Inside a step KFP hides its decorators: a plain module that needs them fails there."""
    plain = [p for p in (ROOT / package).rglob("*.py") if p.name not in {"steps.py", "__init__.py"}]
    modules = [name(path)[:-3].replace("/", ".") for path in plain]
    assert "kfp" not in loaded_by(", ".join(modules), _KFP_RUNTIME="true")


def test_our_processes_import_nothing_from_the_folder_of_the_caller() -> None:
    """`python -m` puts the current folder first: a calendar.py there would be taken for that of Python."""
    started = [
        (file, line.strip())
        for file in (*MODULES, *(ROOT / "infra" / "images").glob("*.*"))
        for line in file.read_text().splitlines()
        if ("sys.executable, " in line and '"-m"' in line) or re.match("exec python.* -m", line)
    ]
    assert len(started) > 12
    assert [one for one in started if "-P" not in one[1]] == []
