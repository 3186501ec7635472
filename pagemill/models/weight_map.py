"""Names of a checkpoint's tensors to places in a model.

Each architecture has one `WeightMap`; `match` holds it against what the files bring and finds, before
any data is read, every tensor that is missing, unknown, there twice, of the wrong shape or of
a type that only a quantized format explains. Called by
`loader`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from pagemill.checkpoint.base import TensorInfo
from pagemill.errors import CheckpointError
from pagemill.quant.base import Loadable, Target

# Names listed of each kind of trouble; the rest is counted.
_MOST_NAMES = 12
# The types of numbers that are no weights by themselves; cast, they would load and mean nothing.
_NO_WEIGHTS = re.compile(r"BOOL|[UI]\d+|C64|F8_.*|F6_.*|F4")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How one architecture's checkpoint names its modules.

    `modules` maps a module of the checkpoint (without prefix; "{}" is the layer's number) to
    "module" or "module:part" of ours; the last word of a tensor's name ("weight", "bias") is left to
    the module.
    """

    modules: Mapping[str, str]
    prefixes: tuple[str, ...] = ()  # stripped when there; the longest that fits
    embedding: str = "embed_tokens"  # the module whose weight a tied head shares
    head: str = "lm_head"
    aliases: tuple[tuple[str, str], ...] = ()  # other spellings of a module -> the one in `modules`
    ignored: tuple[str, ...] = ()  # patterns of whole names that carry no weights of this model

    def normalize(self, name: str) -> str | None:
        """Return a tensor's name without prefix and alias; None when it is to be ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignored):
            return None
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        module, _, suffix = name.rpartition(".")
        return f"{dict(self.aliases).get(module, module)}.{suffix}"

    def expected(self, model: nn.Module, num_layers: int) -> dict[str, Target]:
        """Return where each tensor goes, by normalized name."""
        found: dict[str, Target] = {}
        for name, place in self.modules.items():
            path, _, part = place.partition(":")
            for index in range(num_layers if "{}" in name else 1):
                module = _find(model, path.format(index))
                if module is None:
                    continue
                for suffix, target in module.targets(part).items():
                    found[f"{name.format(index)}.{suffix}"] = replace(target, owner=module)
        return found


def match(
    weight_map: WeightMap,
    expected: Mapping[str, Target],
    infos: Mapping[str, TensorInfo],
    where: str,
) -> dict[str, Target]:
    """Return the target of each tensor of the files that has one.

    Raises CheckpointError listing the missing, unknown, doubled, misshapen and quantized names.
    """
    targets: dict[str, Target] = {}
    given: dict[str, str] = {}
    doubled, unknown, misshapen, encoded = [], [], [], []
    for name, info in infos.items():
        plain = weight_map.normalize(name)
        if plain is None:
            continue
        target = expected.get(plain)
        if target is None:
            unknown.append(name)
        elif plain in given:
            doubled.append(f"{given[plain]} and {name}")
        else:
            given[plain] = name
            targets[name] = target
            if tuple(info.shape) != target.shape:
                misshapen.append(f"{name} is {list(info.shape)}, needed {list(target.shape)}")
            if _NO_WEIGHTS.fullmatch(info.dtype):
                encoded.append(f"{name} is {info.dtype}")
    missing = [name for name in expected if name not in given]
    troubles = {
        "missing": missing,
        "of the wrong shape": misshapen,
        "of a type that holds no plain weights": encoded,
        "there twice": doubled,
        "unknown to this architecture": unknown,
    }
    parts = [f"{kind}: {_listed(names)}" for kind, names in troubles.items() if names]
    if parts:
        raise CheckpointError(
            f"the tensors in {where} do not fit the model; " + "; ".join(parts)
            + ". Check that the files are complete and that config.json belongs to them"
        )  # fmt: skip
    return targets


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{len(names)} ({shown}{f', and {more} more' if more > 0 else ''})"


def _find(model: nn.Module, path: str) -> Loadable | None:
    """Return the module at a dotted path; None when an optional one is off."""
    found: Any = model
    for word in path.split("."):
        found = found[int(word)] if word.isdigit() else getattr(found, word)
        if found is None:
            return None
    return cast(Loadable, found)
