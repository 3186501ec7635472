"""`step_dataclass`: the decorator of objects that a step makes by the thousand.

For the type checker it is `dataclasses.dataclass`, and with `frozen=True` it refuses every assignment. At run time
their fields are set as plain ones are: `frozen` makes Python set each through `object.__setattr__`, which costs
two thirds of making the object. Equality, hash and pickling are those of a frozen dataclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as step_dataclass
else:
    from dataclasses import dataclass

    def step_dataclass(*, frozen: bool, slots: bool, kw_only: bool = False):
        """Return `dataclass` with these options, frozen only by the type checker's word."""
        assert frozen, "objects of a step are never changed"
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)


__all__ = ["step_dataclass"]
