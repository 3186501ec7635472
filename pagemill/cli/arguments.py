"""Flags derived from dataclass fields, and the merge of flags, environment, YAML file and defaults.

A field made by `engine_args.arg` becomes `--its-name` in its group: a bool is `--flag/--no-flag`, a dict
is JSON, a list takes several words, a `..._bytes` field takes sizes such as 2GiB. One value wins, in
this order: the flag; `PAGEMILL_<FIELD>` in the environment; the key in the `--config` YAML file (dashes
or underscores); the field's default. Called by every command.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pagemill import env
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError

D = TypeVar("D")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

GROUP_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "parallel": "parallelism",
    "device": "device",
    "observability": "logs and metrics",
    "server": "HTTP server",
}


def add_fields(
    parser: argparse.ArgumentParser, *kinds: type, skip: Sequence[str] = ("model",)
) -> None:
    """Add one flag a field of each dataclass, in groups, and `--config`.

    Values that are not given are absent from the namespace, so that `settle` can tell.
    """
    groups: dict[str, Any] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):
            if f.name in skip:
                continue
            title = GROUP_TITLES.get(f.metadata["group"], f.metadata["group"])
            # A feature that is refused by name has its flag, but no line in the help.
            hidden = f.metadata.get("unsupported") is not None
            if not hidden and title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(parser if hidden else groups[title], f, hints[f.name], hidden)
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="a YAML file of these arguments; a flag or a PAGEMILL_... variable wins over it",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the optional positional MODEL and `--model`, which means the same."""
    model_help = next(f for f in dataclasses.fields(EngineArgs) if f.name == "model").metadata
    parser.add_argument(
        "model_word",
        nargs="?",
        metavar="MODEL",
        help=f"{model_help['help']}; default: the demo model",
    )
    parser.add_argument("--model", default=argparse.SUPPRESS, help="the same as MODEL")


def settle(namespace: argparse.Namespace, kind: type[D]) -> D:
    """Return an instance of `kind` from the flags, the environment and the YAML file.

    Raises ConfigError naming the argument, where the value came from, and what it may be.
    """
    warn_of_unknown_variables()
    return kind(**_settled_values(namespace, kind, others=()))


def settle_all(namespace: argparse.Namespace, *kinds: type) -> list[Any]:
    """Return one instance a kind; the YAML file may hold the fields of all of them."""
    warn_of_unknown_variables()
    return [
        kind(**_settled_values(namespace, kind, others=[k for k in kinds if k is not kind]))
        for kind in kinds
    ]


def warn_of_unknown_variables() -> None:
    """Say on stderr which PAGEMILL_ variables no command reads, and what was probably meant.

    A warning, not an error: what an environment holds may be meant for another version.
    """
    from pagemill.server.settings import ServerArgs

    known = {f.name for kind in (EngineArgs, ServerArgs) for f in dataclasses.fields(kind)}
    for name in env.unknown_variables(known):
        meant = name.removeprefix(env.PREFIX).lower()
        near = difflib.get_close_matches(meant, sorted(known), n=1, cutoff=0.0)[0]
        print(
            f"pagemill: warning: {name} is no setting and has no effect; did you mean "
            f"{env.PREFIX}{near.upper()}?",
            file=sys.stderr,
        )


def _settled_values(
    namespace: argparse.Namespace, kind: type, others: Sequence[type]
) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    path = getattr(namespace, "config", None)
    if path is not None:
        known = [*fields, *(f.name for other in others for f in dataclasses.fields(other))]
        for name, value in read_yaml(path, known).items():
            if name in fields:
                values[name] = _from_yaml(value, hints[name], name, path)
    for name, text in env.argument_defaults(set(fields)).items():
        where = f"{env.PREFIX}{name.upper()}"
        values[name] = _parse(text, hints[name], name, where)
    for name in fields:
        if hasattr(namespace, name):
            values[name] = getattr(namespace, name)
    word = getattr(namespace, "model_word", None)
    if "model" in fields and word is not None:
        if hasattr(namespace, "model") and namespace.model != word:
            raise ConfigError(
                f"MODEL is {word!r} and --model is {namespace.model!r}; give one of them"
            )
        values["model"] = word
    for name, f in fields.items():
        choices = f.metadata.get("choices")
        if choices and name in values and values[name] not in choices:
            raise ConfigError(f"{name} is {values[name]!r}; choose from {', '.join(choices)}")
    return values


def read_yaml(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a YAML file with underscores; an unknown key names the nearest known one."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not valid YAML: {where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a mapping of argument to value")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"--config {path}: unknown key {key!r}; did you mean {near!r}?")
        if name in values:
            raise ConfigError(f"--config {path}: {name!r} is given twice")
        values[name] = value
    return values


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


def _add_flag(target: Any, f: dataclasses.Field[Any], hint: Any, hidden: bool) -> None:
    flag = "--" + f.name.replace("_", "-")
    help_text = argparse.SUPPRESS if hidden else _help(f)
    common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": help_text}
    base = _base(hint)
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
            return _parse(text, hint, name, "--" + name.replace("_", "-"))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _base(hint: Any) -> type:
    """Return the class behind `X`, `X | None`, `list[X]` or `dict[K, V]`."""
    options = [h for h in typing.get_args(hint) if h is not type(None)]
    if typing.get_origin(hint) in (list, dict):
        return typing.cast(type, typing.get_origin(hint))
    if type(None) in typing.get_args(hint):
        return _base(options[0])
    return typing.cast(type, hint)


def _parse(text: str, hint: Any, name: str, where: str) -> Any:
    """Return the value that `text` stands for; `where` says where it was found."""
    base = _base(hint)
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


def _from_yaml(value: Any, hint: Any, name: str, path: str) -> Any:
    base = _base(hint)
    where = f"--config {path}: {name}"
    if value is None and type(None) in typing.get_args(hint):
        return None
    if isinstance(value, str) and base in (int, float, dict):
        return _parse(value, hint, name, where)
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if base is list and isinstance(value, (str, int)):
        value = [value]
    wrong = not isinstance(value, base) or (isinstance(value, bool) and base is not bool)
    if wrong:
        shown = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false"}
        wanted = shown.get(base, "a whole number" if base is int else "a number")
        raise ConfigError(f"{where} is {value!r}; it must be {wanted}")
    return value
