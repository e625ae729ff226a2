"""Read facts from source files without importing them: classes, defaults, comments, exit codes."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from feature_repo import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")


@dataclass(frozen=True)
class Field:
    """One field of a class with its default and the comment beside or above it."""

    name: str
    default: str
    meaning: str


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> list[Path]:
    """Return every module of the five packages."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in paths if "_pb2" not in path.name)


def class_node(path: Path, name: str) -> ast.ClassDef:
    """Return the class of that name in a module."""
    [node] = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name]
    return node


def first_line(node: ast.ClassDef) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def class_fields(path: Path, name: str) -> list[Field]:
    """Return the fields of a dataclass in order, each with the comment on its lines or above it."""
    rows = path.read_text(encoding="utf-8").splitlines()
    found = []
    for node in class_node(path, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = rows[node.lineno - 1 : (node.end_lineno or node.lineno)]
            meaning = " ".join(comment(line) for line in lines).strip()
            above = node.lineno - 2
            while not meaning and rows[above].lstrip().startswith("#"):
                above -= 1
            if not meaning:
                meaning = " ".join(comment(line) for line in rows[above + 1 : node.lineno - 1]).strip()
            default = "" if node.value is None else written(node.value)
            found.append(Field(node.target.id, default, meaning))
    return found


def comment(line: str) -> str:
    """Return the text behind `# ` on a line."""
    match = re.search(r"# (?!noqa|type:)(.*)$", line)
    return match[1].strip() if match else ""


def written(value: ast.expr) -> str:
    """Return a default as a person writes it: the argument of `field(...)`, whole numbers without `_`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        inner = keywords.get("default") or keywords.get("default_factory")
        return written(inner) if inner is not None else ""
    return ast.unparse(value)


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
