"""Environment, `.env` and `reco.toml` -> the values of a settings class, checked by pydantic.

The first place that names a setting wins, in that order. RECO_CONFIG names another TOML file; `off` means
neither file is read. pydantic is imported where settings are read, so that `reco --help` stays fast.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from feature_repo.ids import closest

CONFIG = "RECO_CONFIG"
TOML_FILE, DOTENV_FILE, NO_FILE = "reco.toml", ".env", "off"
TOML_BYTES = 16 << 10  # one key of 64 KiB of dots would cost gigabytes


def setting(
    default: Any,
    description: str,
    *,
    expected: str = "text",
    secret: bool = False,
    verbatim: bool = False,
    check: Callable[[Any], Any] | None = None,
    **limits: float,
) -> Any:
    """Return the field of a settings class.

    Args:
        default: used if no place names the setting.
        description: for the reference page.
        expected: for the message about an invalid value.
        secret: neither `repr` nor a message shows the value.
        verbatim: spaces around the text belong to the value.
        check: returns the value, or raises ValueError; its message follows `expected`.
        **limits: constraints of pydantic, for example `ge`.
    """
    if {"ge", "le"} <= limits.keys():
        kind = "whole number" if isinstance(default, int) else "number"
        expected = f"a {kind} from {limits['ge']:g} to {limits['le']:g}"
    metadata = {
        "description": description,
        "expected": expected,
        "secret": secret,
        "verbatim": verbatim,
        "check": check,
        "limits": limits,
    }
    return field(default=default, repr=not secret, metadata=metadata)


def read_values(
    kind: type,
    variables: Mapping[str, str],
    table: str,
    environ: Mapping[str, str] | None,
    error: type[Exception],
    only: Collection[str] = (),
) -> dict[str, Any]:
    """Return the checked value of each field that some place names.

    Args:
        kind: dataclass whose fields are made by `setting`.
        variables: field -> environment variable.
        table: of the TOML file; empty means its top level.
        environ: the environment; None means that of the process.
        error: raised for an invalid value, naming the place, the value and the expected one.
        only: fields to read; empty means all.
    """
    environ = os.environ if environ is None else environ
    file = _toml_file(environ, error)
    rows, dotenv = _rows(kind, table, file, error), _dotenv(environ, error)
    hints, values = get_type_hints(kind), {}
    for f in fields(kind):
        if only and f.name not in only:
            continue
        variable = variables[f.name]
        text = environ.get(variable, "")
        places = (
            (text if f.metadata["verbatim"] else text.strip(), variable),
            (dotenv.get(variable), f"{variable} in {DOTENV_FILE}"),
            (rows.get(f.name), f"{f.name} in {file}"),
        )
        value, place = next((one for one in places if one[0] not in (None, "")), (None, ""))
        if place:
            values[f.name] = _checked(value, hints[f.name], f.metadata, place, error)
    return values


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], place: str, error: type[Exception]) -> Any:
    """Return the value of a field; refuse an invalid one."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

    kind = TypeAdapter(Annotated[hint, Field(**metadata["limits"])], config=ConfigDict(allow_inf_nan=False))
    try:
        if isinstance(value, bool) and hint is not bool:
            raise ValueError  # `true` in the TOML file, which pydantic takes for 1
        checked = kind.validate_python(value)
        if metadata["check"]:
            metadata["check"](checked)
        return checked
    except ValueError as invalid:
        why = "" if isinstance(invalid, ValidationError) else str(invalid)
    shown = repr(value)
    if metadata["secret"]:
        scheme, is_url, _ = str(value).partition("://")
        shown = f"a {scheme!r} URL" if is_url and scheme.isidentifier() else "invalid (not shown)"
    raise error(f"{place} is {shown}; expected {metadata['expected']}{f' ({why})' if why else ''}")


def _dotenv(environ: Mapping[str, str], error: type[Exception]) -> dict[str, str | None]:
    """Return the variables that `.env` names, in capitals, if it is read.

    Lines that the library would pass over are refused: a setting on them, a token perhaps, would be off.
    """
    if environ.get(CONFIG, "").strip() == NO_FILE or not Path(DOTENV_FILE).is_file():
        return {}
    from dotenv.main import resolve_variables
    from dotenv.parser import parse_stream

    try:
        with open(DOTENV_FILE, encoding="utf-8") as stream:
            lines = list(parse_stream(stream))
    except (OSError, UnicodeDecodeError) as unreadable:
        raise error(
            f"{DOTENV_FILE} cannot be read ({type(unreadable).__name__}); expected lines VARIABLE=VALUE"
        ) from None
    for line in lines:
        key, value, text = line.key or "", line.value or "", line.original.string
        is_ours = "RECO_" in f"{key}{value}".upper()
        if line.error or (is_ours and (line.value is None or '"' in key or "\n" in value)):
            blank = text[: len(text) - len(text.lstrip())].count("\n")
            raise error(
                f"{DOTENV_FILE}, line {line.original.line + blank}: expected VARIABLE=VALUE, with a quote at "
                "both ends of the value or at none"
            )
    pairs = [(line.key, line.value) for line in lines if line.key is not None]
    return {name.upper(): value for name, value in resolve_variables(pairs, override=True).items()}


def has_files(environ: Mapping[str, str]) -> bool:
    """Say whether a file may name settings."""
    if environ.get(CONFIG, "").strip():
        return environ[CONFIG].strip() != NO_FILE
    return Path(TOML_FILE).is_file() or Path(DOTENV_FILE).is_file()


def dotenv_names(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that `.env` names, in capitals, if it is read; none if it cannot be read."""
    try:
        return list(_dotenv(environ, ValueError))
    except ValueError:
        return []


def as_text(value: object) -> str:
    """Return a value as the text of its variable."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml_file(environ: Mapping[str, str], error: type[Exception]) -> Path | None:
    named = environ.get(CONFIG, "").strip()
    if named == NO_FILE:
        return None
    file = Path(named or TOML_FILE)
    if not file.is_file():
        if named:
            raise error(f"{CONFIG} is {named!r}; expected a TOML file that can be read, or {NO_FILE}")
        return None
    return file


def _rows(kind: type, table: str, file: Path | None, error: type[Exception]) -> dict[str, Any]:
    """Return the settings of the TOML file; refuse unknown names, which would have no effect."""
    if file is None:
        return {}
    if file.stat().st_size > TOML_BYTES:
        raise error(f"{file} has more than {TOML_BYTES} bytes; expected a few lines of KEY = VALUE")
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as invalid:
        raise error(
            f"{file} cannot be read as TOML ({type(invalid).__name__}); expected KEY = VALUE"
        ) from None
    rows = document.get(table, {}) if table else {k: v for k, v in document.items() if k != "kafka"}
    known = [f.name for f in fields(kind)] + ([] if table else ["kafka"])
    if not isinstance(rows, dict):
        raise error(f"{table} in {file} is no table; expected [{table}]")
    for name in rows:
        if name not in known:
            raise error(f"{file} has an unknown setting {name!r}: {closest(name, known)}")
    # As in a variable, an empty text means the default.
    return {name: value for name, value in rows.items() if not isinstance(value, str) or value.strip()}
