"""YAML to frozen dataclasses, with errors that name the key, the value and what is allowed."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Literal

import yaml


class ConfigError(ValueError):
    """A configuration is wrong; the message names the key, the value and what is allowed."""


def read_yaml(path: Path) -> object:
    """What the YAML file at `path` holds. Raises: ConfigError when it cannot be read."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid YAML: {error}") from error


def build(cls, tree, prefix: str = ""):
    """The dataclass `cls` from a mapping; `prefix` is the dotted path of the mapping, for errors.

    Raises: ConfigError.
    """
    where = prefix.rstrip(".") or "the configuration"
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must be a mapping of keys to values (given: {tree!r})")
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(
                f"{prefix}{key}: unknown key; {hint}allowed in {where}: {', '.join(sorted(known))}"
            )
    values = {}
    for key, f in known.items():
        if key in tree:
            values[key] = _convert(hints[key], tree[key], prefix + key)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{key}: missing; it must be {_describe(hints[key])}")
    return cls(**values)


def _convert(hint, value, key: str):
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key + ".")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(hint) is typing.Union:
        options = typing.get_args(hint)
    for option in options:
        converted = _match(option, value)
        if converted is not _NO:
            return converted
    raise ConfigError(f"{key}: must be {_describe(hint)} (given: {value!r})")


_NO = object()


def _match(hint, value):
    """`value` as `hint`, or _NO. YAML reads 1e-4 as a string; it is taken as the number meant."""
    if hint is type(None):
        return None if value is None else _NO
    if typing.get_origin(hint) is Literal:
        return value if value in typing.get_args(hint) else _NO
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
            return tuple(str(v) for v in value)
        return _NO
    if hint is bool:
        return value if isinstance(value, bool) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return _NO
        try:
            return float(value)
        except ValueError:
            return _NO
    return value if isinstance(value, hint) else _NO


def _describe(hint) -> str:
    if dataclasses.is_dataclass(hint):
        return "a section"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if hint in names:
        return names[hint]
    return " or ".join(_describe(h) for h in typing.get_args(hint) if h is not type(None))


def at_least(section: str, config, key: str, least: int) -> None:
    """Raises ConfigError when the field `key` of `config` is below `least`."""
    value = getattr(config, key)
    if value < least:
        name = f"{section}.{key}" if section else key
        raise ConfigError(f"{name}: must be at least {least} (given: {value})")
