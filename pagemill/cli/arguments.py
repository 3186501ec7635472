"""Flags derived from dataclass fields, and the merge of flags, environment, YAML file and defaults.

How a field becomes a flag says `pagemill.flags`. One value wins, in this order: the flag; `PAGEMILL_<FIELD>` in the environment; the key in the `--config` YAML file (dashes
or underscores); the field's default. Called by every command.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pagemill import env
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from pagemill.flags import add_flag, base_of, parse_value

D = TypeVar("D")

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
            add_flag(parser if hidden else groups[title], f, hints[f.name], hidden=hidden)
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
        values[name] = parse_value(text, hints[name], name, where)
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
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file has
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


def _from_yaml(value: Any, hint: Any, name: str, path: str) -> Any:
    base = base_of(hint)
    where = f"--config {path}: {name}"
    if value is None and type(None) in typing.get_args(hint):
        return None
    if isinstance(value, str) and base in (int, float, dict):
        return parse_value(value, hint, name, where)
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
