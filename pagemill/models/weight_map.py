"""Names of a checkpoint's tensors to places in a model.

Each architecture has one `WeightMap`; `match` holds it against what the files bring and finds, before
any data is read, every tensor that is missing, unknown, there twice, of the wrong shape or of
a type that only a quantized format explains. Called by
`loader`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from pagemill.checkpoint.base import TensorInfo
from pagemill.errors import CheckpointError
from pagemill.quant.base import AnyTarget, Loadable, ModuleName

# Names listed of each kind of trouble; the rest is counted.
_MOST_NAMES = 12


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

    def expected(self, model: nn.Module, num_layers: int) -> dict[str, AnyTarget]:
        """Return where each tensor goes, by normalized name."""
        found: dict[str, AnyTarget] = {}
        for name, module, part in self._places(model, num_layers):
            for suffix, target in module.targets(part).items():
                found[f"{name}.{suffix}"] = replace(target, owner=module)
        return found

    def names(
        self, model: nn.Module, num_layers: int
    ) -> list[tuple[Loadable, dict[str, ModuleName]]]:
        """Return the model's modules with the names of their parts in checkpoints."""
        found: dict[int, tuple[Loadable, dict[str, ModuleName]]] = {}
        for name, module, part in self._places(model, num_layers):
            parts = found.setdefault(id(module), (module, {}))[1]
            parts[part] = ModuleName(name, (name, *(prefix + name for prefix in self.prefixes)))
        return list(found.values())

    def _places(self, model: nn.Module, num_layers: int) -> Iterator[tuple[str, Loadable, str]]:
        """Yield each module's name in the checkpoint, our module, and the part of it."""
        for name, place in self.modules.items():
            path, _, part = place.partition(":")
            for index in range(num_layers if "{}" in name else 1):
                module = _find(model, path.format(index))
                if module is not None:
                    yield name.format(index), module, part


def match(
    weight_map: WeightMap,
    expected: Mapping[str, AnyTarget],
    infos: Mapping[str, TensorInfo],
    where: str,
    *,
    ignored: Collection[str] = (),
) -> dict[str, AnyTarget]:
    """Return the target of each tensor of the files that has one.

    `ignored` are further patterns of names without weights, those of a quantized format.

    Raises CheckpointError listing the missing, unknown, doubled, misshapen and quantized names.
    """
    targets: dict[str, AnyTarget] = {}
    given: dict[str, str] = {}
    doubled, unknown, misshapen, mistyped = [], [], [], []
    for name, info in infos.items():
        plain = weight_map.normalize(name)
        if plain is None:
            continue
        target = expected.get(plain)
        if target is None:
            if not any(re.fullmatch(pattern, plain) for pattern in ignored):
                unknown.append(name)
        elif plain in given:
            doubled.append(f"{given[plain]} and {name}")
        else:
            given[plain] = name
            targets[name] = target
            wrong = target.wrong_shape(tuple(info.shape))
            if wrong is not None:
                misshapen.append(f"{name} is {list(info.shape)}, {wrong}")
            wrong = target.wrong_type(info.dtype)
            if wrong is not None:
                mistyped.append(f"{name} is {info.dtype}, {wrong}")
    missing = [name for name in expected if name not in given and not expected[name].optional]
    troubles = {
        "missing": missing,
        "of the wrong shape": misshapen,
        "of the wrong type": mistyped,
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
