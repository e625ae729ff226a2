"""Read facts from source files without importing them: classes, constants, exit codes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from feature_repo import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> list[Path]:
    """Return every module of the five packages."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in paths if "_pb2" not in path.name)


def first_line(node: ast.ClassDef) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


@cache
def classes() -> dict[str, tuple[ast.ClassDef, Path]]:
    """Return every class of the five packages by its name, which is unique."""
    return {
        node.name: (node, path)
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }


def bases(name: str) -> list[str]:
    """Return the names of a class's bases; none for a class of a library."""
    node = classes()[name][0] if name in classes() else None
    return [ast.unparse(base).split(".")[-1] for base in node.bases] if node else []


def expected_errors() -> Iterator[tuple[str, ast.ClassDef, Path]]:
    """Yield (name, class, file) of every class that derives from `RecoError`."""

    def is_expected(name: str) -> bool:
        return name == "RecoError" or any(is_expected(base) for base in bases(name))

    for name, (node, path) in sorted(classes().items()):
        if name != "RecoError" and is_expected(name):
            yield name, node, path


def exit_code(name: str) -> int | None:
    """Return the exit code that a class sets or inherits."""
    if name not in classes():
        return None
    value = constant(classes()[name][0], "exit_code")
    if isinstance(value, int):
        return value
    return next((code for code in map(exit_code, bases(name)) if code is not None), None)


def constant(node: ast.ClassDef, name: str) -> object:
    """Return the constant that a class body assigns to `name`, or None; a name is looked up in the errors."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = statement.value
            if isinstance(value, ast.Name):
                return getattr(errors, value.id, None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def shell_lines(page: str) -> list[str]:
    """Return every command of a page's shell blocks, in order, each on one line."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    return [" ".join(line.split()) for line in blocks.replace("\\\n", " ").splitlines()]
