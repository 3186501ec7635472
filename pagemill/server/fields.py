"""`Fields`: one JSON object of a request, read field by field. Whatever is not read is an error.

Called by `protocol`. null means the default. Messages name the field, the value and what it may be.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pagemill.sampling_params import as_whole, shown
from pagemill.server.errors import ApiError


def wrong(name: str, value: object, wanted: str) -> ApiError:
    """Return the error of a field with a value that it cannot have."""
    return ApiError(f"{name} is {shown(value)}; it must be {wanted}", param=name)


class Fields:
    """The fields of one object; `prefix` names the object inside the request ("stream_options.")."""

    def __init__(self, data: dict[str, Any], prefix: str = "") -> None:
        self._left = dict(data)
        self._prefix = prefix
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """Return the raw value, or None when it is absent."""
        self._known.add(name)
        return self._left.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a string."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(self._prefix + name, value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self._prefix + name, value, "true or false")
        return value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return a whole number from `low` (to `high`), or None."""
        value = self.take(name)
        if value is None:
            return None
        value = as_whole(value)
        in_range = (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= low
            and (high is None or value <= high)
        )
        if not in_range:
            wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise wrong(self._prefix + name, value, f"a whole number {wanted}")
        return int(value)

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Return an object."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(self._prefix + name, value, "an object")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        """Return a list of objects."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise wrong(self._prefix + name, value, "a list of objects")
        return value

    def accept(self, names: Iterable[str]) -> None:
        """Take fields of OpenAI's API that mean nothing to a server of one model."""
        for name in names:
            self.take(name)

    def refuse(self, reasons: dict[str, str], harmless: dict[str, tuple[Any, ...]]) -> None:
        """Refuse features by name, with the reason; null and the `harmless` values pass."""
        for name, reason in reasons.items():
            value = self.take(name)
            if value is None or any(value == ok for ok in harmless.get(name, ())):
                continue
            raise ApiError(f"{self._prefix}{name}: {reason}", param=self._prefix + name)

    def end(self) -> None:
        """Refuse what nobody read, naming the nearest field that is known."""
        for name in self._left:
            near = difflib.get_close_matches(name, sorted(self._known), n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            full = self._prefix + name
            raise ApiError(f"unknown field {shown(full)}{hint}", param=full)
