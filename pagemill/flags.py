"""From a dataclass field to a command line flag, and from its text to a value.

A field made by `engine_args.arg` becomes `--its-name`: a bool is `--flag/--no-flag`, a dict is JSON, a
list takes several words, a `..._bytes` field takes sizes such as 2GiB. Called by the command line and by
`EngineArgs.add_cli_args`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Callable
from typing import Any

from pagemill.errors import ConfigError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def parse_size(text: str) -> int:
    """Return a whole number: 2GiB is 2 * 2**30, 2GB is 2 * 10**9, 2k is 2000, 2ki is 2048."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write a whole number, or one such as 2GiB or 512MB")
    number, unit = match[1], (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    value = float(number) * base ** _POWERS.get(unit[:1], 0)
    if not value.is_integer():
        raise ValueError(f"{text!r} is no whole number")
    return int(number) * base ** _POWERS.get(unit[:1], 0) if number.isdigit() else int(value)


def add_flag(
    target: Any,
    f: dataclasses.Field[Any],
    hint: Any,
    *,
    hidden: bool,
    default: Any = argparse.SUPPRESS,
) -> None:
    """Add the flag of a field to a parser or to a group of one; a hidden one has no line in the help."""
    flag = "--" + f.name.replace("_", "-")
    help_text = argparse.SUPPRESS if hidden else _help(f)
    common: dict[str, Any] = {"dest": f.name, "default": default, "help": help_text}
    base = base_of(hint)
    if base is bool:
        target.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif base is list:
        target.add_argument(flag, nargs="+", metavar="WORD", **common)
    else:
        common["metavar"] = _metavar(base, f)
        common["type"] = _argument_type(hint, f.name)
        if f.metadata.get("choices"):
            common["choices"] = f.metadata["choices"]
            common["metavar"] = None
        target.add_argument(flag, **common)


def _help(f: dataclasses.Field[Any]) -> str:
    text = str(f.metadata["help"]).replace("%", "%%")
    default = f.default if f.default is not dataclasses.MISSING else None
    if default is None or default is False or "default:" in text:
        return text
    return f"{text} (default: {str(default).replace('%', '%%')})"


def _metavar(base: type, f: dataclasses.Field[Any]) -> str:
    if f.name.endswith("_bytes"):
        return "SIZE"
    return {int: "N", float: "X", dict: "JSON"}.get(base, f.name.upper().split("_")[-1])


def _argument_type(hint: Any, name: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse_value(text, hint, name, "--" + name.replace("_", "-"))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def base_of(hint: Any) -> type:
    """Return the class behind `X`, `X | None`, `list[X]` or `dict[K, V]`."""
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if typing.get_origin(hint) in (list, dict):
        return typing.cast(type, typing.get_origin(hint))
    if type(None) in typing.get_args(hint):
        return base_of(options[0])
    return typing.cast(type, hint)


def parse_value(text: str, hint: Any, name: str, where: str) -> Any:
    """Return the value that `text` stands for; `where` says where it was found."""
    base = base_of(hint)
    try:
        if base is bool:
            return _parse_bool(text)
        if base is int:
            return parse_size(text) if name.endswith("_bytes") else int(text)
        if base is float:
            return float(text)
        if base is list:
            return json.loads(text) if text.lstrip().startswith("[") else text.split(",")
        if base is dict:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError("it must be a JSON object")
            return value
    except ValueError as error:
        kind = {int: "a whole number", float: "a number", dict: "a JSON object"}.get(base, "")
        wanted = f"; it must be {kind}" if kind and not name.endswith("_bytes") else f": {error}"
        raise ConfigError(f"{where} is {text!r}{wanted}") from None
    return text


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("write true or false")
