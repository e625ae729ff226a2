"""Check the English of docstrings, comments and pages: `python -m tests.prose.prose [PATH ...]`.

Prints one line for each finding, and the mean sentence length. Exit code 1 if anything was found.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")
LONGEST_SENTENCE = 35  # words

# Each pattern with the wording that replaces it.
BANNED = {
    r"\bwhat (?:is|are|was|were|comes|came|has|had|can|cannot|they|it|one|of|a|the)\b": "'the X that ...'",
    r"\b(?:nobody|somebody|whoever|anybody|everybody)\b": "'the client', 'no request', 'each user'",
    r"(?:^|[.;:,(] ?)[Ww]ho (?!else)": "a noun as the subject",
    r"\b(?:is|are) none\b": "'invalid', 'missing'",
    r"\b(?:likewise|anew|of late)\b": "'see X', 'again', 'recently'",
    r"\b(?:told|tells)\b": "'logged', 'reported', 'says'",
}


@cache
def blocks(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, text) for each docstring and comment block of a module, or paragraph of a page."""
    return tuple(_blocks(path))


def _blocks(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"```.*?```|`[^`\n]*`", lambda m: "\n" * m[0].count("\n") + "x", text, flags=re.DOTALL)
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            prose = [row for row in paragraph.splitlines() if not row.lstrip().startswith(("#", "<", "!["))]
            # Each bullet and each cell of a table is a sentence of its own.
            text = re.sub(r"(?m)^\s*(?:[-*]|\d+\.) ", ". ", "\n".join(prose))
            yield line, re.sub(r"(?m)(?<=\S) *\|", ".", re.sub(r"(?m)^ *\| *", "", text))
            line += paragraph.count("\n")
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(?:type:|noqa|-{5})", token.string):
            if token.line.lstrip().startswith("#"):
                comments[token.start[0]] = token.string.lstrip("# ")
            else:
                yield token.start[0], token.string.lstrip("# ")
    for line, comment in comments.items():
        if line - 1 not in comments:
            rows = [comment]
            while line + len(rows) in comments:
                rows.append(comments[line + len(rows)])
            yield line, "\n".join(rows)


def sentences(text: str) -> Iterator[str]:
    """Split at the end of a sentence, a semicolon, a colon or an empty line."""
    for part in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text):
        if len(part.split()) > 2:
            yield " ".join(part.split())


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line: finding` for each banned wording and each sentence that is too long."""
    place = path.relative_to(ROOT)
    for line, text in blocks(path):
        for pattern, instead in BANNED.items():
            for match in re.finditer(pattern, text, flags=re.MULTILINE):
                row = line + text[: match.start()].count("\n")
                yield f"{place}:{row}: '{match[0].strip()}', better {instead}"
        for sentence in sentences(text):
            if len(sentence.split()) > LONGEST_SENTENCE:
                yield f"{place}:{line}: {len(sentence.split())} words: {sentence[:70]}..."


def pages() -> list[Path]:
    """Return the modules and pages that are checked: no generated code, no result files."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py")]
    skipped = ("_pb2", "docs/figures", "CHANGELOG", "tests/prose")
    return sorted(path for path in (*modules, *texts) if not any(word in path.as_posix() for word in skipped))


def main() -> int:
    """Check the given files and folders, or everything."""
    chosen = [Path(argument).resolve() for argument in sys.argv[1:]]
    paths = [path for path in pages() if not chosen or any(path.is_relative_to(each) for each in chosen)]
    lines = [line for path in paths for line in findings(path)]
    lengths = [len(s.split()) for path in paths for _, text in blocks(path) for s in sentences(text)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stderr.write(
        f"{len(lines)} findings in {len(paths)} files, mean sentence {mean(lengths or [0]):.1f} words\n"
    )
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
