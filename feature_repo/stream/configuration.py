"""Environment, `.env` and `reco.toml` -> the values of a settings class, checked by pydantic.

The first place that names a setting wins, in that order. RECO_CONFIG names another TOML file; `off` means
neither file is read. pydantic is imported where settings are read, so that `reco --help` stays fast.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from feature_repo.ids import closest

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

CONFIG = "RECO_CONFIG"
TOML_FILE, DOTENV_FILE, NO_FILE = "reco.toml", ".env", "off"
TOML_BYTES = 16 << 10  # one key of 64 KiB of dots would cost gigabytes


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as a reference page lists it."""

    variable: str
    key: str  # in the TOML file
    default: object
    description: str


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


def list_settings(kind: type, variables: Mapping[str, str], table: str = "") -> list[Setting]:
    """Return name, default and description of each field of a settings class."""
    prefix = f"{table}." if table else ""
    return [
        Setting(
            variables[f.name],
            prefix + f.name,
            None if f.default is MISSING else f.default,
            f.metadata["description"],
        )
        for f in fields(kind)
    ]


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
    from pydantic import ValidationError

    environ = os.environ if environ is None else environ
    own = {f.name: f for f in fields(kind) if not only or f.name in only}
    texts = {n: environ.get(variables[n], "") for n in own}
    texts = {n: text if own[n].metadata["verbatim"] else text.strip() for n, text in texts.items()}
    file = _toml_file(environ, error)
    rows = _rows(kind, table, file, error)
    given = {variables[n]: text for n, text in texts.items() if text}
    stored = {variables[n]: value for n, value in rows.items() if n in own}
    dotenv = None if environ.get(CONFIG, "").strip() == NO_FILE else DOTENV_FILE
    model = _model(kind, own, variables, given, stored, dotenv)
    try:
        if dotenv and Path(dotenv).is_file():
            _check_dotenv(Path(dotenv), error)
        checked = model()
    except ValidationError as invalid:
        raise error(_message(invalid, kind, variables, given, stored, str(file))) from None
    except (OSError, UnicodeDecodeError) as unreadable:
        raise error(
            f"{DOTENV_FILE} cannot be read ({type(unreadable).__name__}); expected lines VARIABLE=VALUE"
        ) from None
    return {name: _plain(getattr(checked, name)) for name in own if name in checked.model_fields_set}


def _check_dotenv(file: Path, error: type[Exception]) -> None:
    """Refuse lines that the library would pass over: a setting on them, a token perhaps, would be off."""
    from dotenv.parser import parse_stream

    with file.open(encoding="utf-8") as stream:
        for line in parse_stream(stream):
            key, value, text = line.key or "", line.value or "", line.original.string
            is_ours = "RECO_" in f"{key}{value}".upper()
            if line.error or (is_ours and (line.value is None or '"' in key or "\n" in value)):
                blank = text[: len(text) - len(text.lstrip())].count("\n")
                raise error(
                    f"{file}, line {line.original.line + blank}: expected VARIABLE=VALUE, with a quote at "
                    "both ends of the value or at none"
                )


def has_files(environ: Mapping[str, str]) -> bool:
    """Say whether a file may name settings."""
    if environ.get(CONFIG, "").strip():
        return environ[CONFIG].strip() != NO_FILE
    return Path(TOML_FILE).is_file() or Path(DOTENV_FILE).is_file()


def dotenv_names(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that `.env` names, if it is read; none if it cannot be read."""
    if environ.get(CONFIG, "").strip() == NO_FILE or not Path(DOTENV_FILE).is_file():
        return []
    from dotenv import dotenv_values

    try:
        return list(dotenv_values(DOTENV_FILE))
    except (OSError, UnicodeDecodeError):
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


def _model(
    kind: type,
    own: Mapping[str, Field[Any]],
    variables: Mapping[str, str],
    given: dict[str, Any],
    stored: dict[str, Any],
    dotenv: str | None,
) -> type[BaseSettings]:
    """Return a model of pydantic-settings, whose creation reads the three places."""
    from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, create_model
    from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

    class Places(BaseSettings):
        model_config = SettingsConfigDict(
            extra="ignore",
            env_file=dotenv,
            env_ignore_empty=True,
            allow_inf_nan=False,
            validate_default=False,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                InitSettingsSource(settings_cls, given),
                dotenv_settings,
                InitSettingsSource(settings_cls, stored),
            )

    hints = get_type_hints(kind)
    columns: dict[str, Any] = {}
    for name, f in own.items():
        hint: Any = SecretStr if f.metadata["secret"] and hints[name] is str else hints[name]
        if hint in (int, float):
            hint = Annotated[hint, BeforeValidator(_no_switch)]
        if check := f.metadata["check"]:
            hint = Annotated[hint, AfterValidator(_checking(check))]
        columns[name] = (hint, Field(f.default, validation_alias=variables[name], **f.metadata["limits"]))
    return create_model(kind.__name__, __base__=Places, **columns)


def _checking(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        check(_plain(value))
        return value

    return checked


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # `true` in the TOML file, which pydantic takes for 1
        raise ValueError
    return value


def _plain(value: Any) -> Any:
    reveal = getattr(value, "get_secret_value", None)
    return reveal() if reveal else value


def _message(
    invalid: Any,
    kind: type,
    variables: Mapping[str, str],
    given: Mapping[str, Any],
    stored: Mapping[str, Any],
    file: str,
) -> str:
    first = invalid.errors(include_url=False)[0]
    variable = first["loc"][0]
    name = next(n for n, v in variables.items() if v == variable)
    metadata = next(f.metadata for f in fields(kind) if f.name == name)
    value = _plain(first["input"])
    place = variable
    if variable not in given:
        is_stored = variable in stored and stored[variable] is first["input"]  # NaN differs from itself
        place = f"{name} in {file}" if is_stored else f"{variable} in {DOTENV_FILE}"
    why = str(first.get("ctx", {}).get("error", ""))
    shown = repr(value)
    if metadata["secret"]:
        scheme, is_url, _ = str(value).partition("://")
        shown = f"a {scheme!r} URL" if is_url and scheme.isidentifier() else "invalid (not shown)"
    return f"{place} is {shown}; expected {metadata['expected']}{f' ({why})' if why else ''}"
