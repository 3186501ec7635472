"""Names to implementations, imported on first use.

A registry entry is the string "module:attribute"; the module is imported when the name is chosen and
not before, so listing the known names costs nothing. Called by every room that has kinds: models,
attention, quantization, executors, devices, policies.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar, cast

from pagemill.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from name to a "module:attribute" string."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def names(self) -> Iterable[str]:
        """Return the known names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, target: str) -> None:
        """Add `name` -> "module:attribute". A name that is taken is an error."""
        if name in self._entries:
            raise ConfigError(
                f"{self._kind} {name!r} is registered already, as {self._entries[name]!r}; "
                "choose another name"
            )
        self._entries[name] = target

    def load(self, name: str) -> T:
        """Import and return what `name` stands for; an unknown name lists the known ones."""
        target = self._entries.get(name)
        if target is None:
            known = ", ".join(self.names()) or "none"
            raise UnknownNameError(f"unknown {self._kind} {name!r}; known: {known}")
        module_name, _, attribute = target.partition(":")
        return cast(T, getattr(importlib.import_module(module_name), attribute))
