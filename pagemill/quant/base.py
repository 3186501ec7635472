"""The seam between linear layers and weight formats.

A linear layer knows its sizes and which rows belong to which projection; how the numbers are stored
and multiplied is the format's. The format keeps its tensors as parameters of the layer, so that they
move and count like any other. Also here: what every loadable layer offers the loader, `Target`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of a checkpoint goes: a view of a parameter, filled in place."""

    view: Tensor  # part of a parameter, in the order of the file's elements
    shape: tuple[int, ...]  # that the file must have; expands or reshapes to the view's
    owner: Loadable | None = None  # whose parameter it is, set by the weight map

    @staticmethod
    def of(view: Tensor) -> Target:
        """Return the target of a file tensor that has the view's own shape."""
        return Target(view, tuple(view.shape))

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> Target:
        """Return the target of a file that holds the same elements in another arrangement."""
        view = arrange(self.view)
        return Target(view, tuple(view.shape))

    def fill(self, tensor: Tensor) -> None:
        """Cast and copy `tensor`, whose shape was checked, into the parameter."""
        if tensor.numel() == self.view.numel():
            self.view.copy_(tensor.reshape(self.view.shape))
        else:
            self.view.copy_(tensor.expand(self.view.shape))


class RandomWeights:
    """Made-up weights for benchmarks: one buffer of random numbers, laid over every parameter."""

    # A prime, so that rows of the usual sizes do not repeat each other.
    _LENGTH = 1_048_573

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        numbers = torch.rand(self._LENGTH, generator=generator).mul_(2).sub_(1)
        self._numbers = numbers.to(device=device, dtype=dtype)
        self._next = 0

    def fill(self, parameter: Tensor, bound: float) -> None:
        """Fill a contiguous parameter with numbers from [-bound, bound]."""
        flat = parameter.view(-1)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, self._LENGTH - self._next)
            source = self._numbers[self._next : self._next + count]
            torch.mul(source, bound, out=flat[done : done + count])
            done += count
            self._next = (self._next + count) % self._LENGTH


class Loadable(Protocol):
    """A module with parameters of its own."""

    def targets(self, part: str) -> dict[str, Target]:
        """Return where the tensors of `part` go, by the last word of their checkpoint names.

        A part is what one module of the checkpoint fills: "" is all of this module, other names are
        the module's own ("q", "gate", ...).
        """
        ...  # fmt: skip

    def randomize(self, weights: RandomWeights) -> None:
        """Fill the parameters with made-up values of a plausible size."""
        ...


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The sizes of a linear layer."""

    in_features: int
    out_features: int
    bias: bool
    # Of a gated layer, whose rows are a gate's and as many of an up projection: the activation's name.
    gate: str | None = None


class QuantMethod(Protocol):
    """How the weights of linear layers are kept and used. One object serves all layers of a model.

    A layer is a module with its `LinearShape` as `shape`: a linear layer, an output head, or an
    embedding, which is one where a head is tied to it.
    """

    def create_weights(
        self, layer: nn.Module, shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the format's parameters on `layer`; `dtype` is what activations have."""
        ...

    def targets(self, layer: nn.Module, start: int, stop: int) -> dict[str, Target]:
        """Return where the checkpoint tensors of output rows start:stop go, by suffix."""
        ...

    def randomize(self, layer: nn.Module, weights: RandomWeights) -> None:
        """Fill the layer with made-up weights."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Bring the layer, all of whose tensors are filled, into the form that it is used in.

        On the meta device too, so that sizes agree.
        """
        ...

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the layer's output [num_tokens, out_features] of x [num_tokens, in_features].

        It is added to `residual` in place where one is given; else it has `out_dtype`, or x's.
        """
        ...

    def apply_gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return act(gate) * up [num_tokens, out_features / 2] of a layer whose shape has a gate."""
        ...

    def gated_outputs(self, gate: str) -> int:
        """Return the most temporary memory of `apply_gated`, its result included, in results."""
        ...

    def rows(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Return rows ids [count] int64 of the layer's matrix, [count, in_features]: a fresh tensor."""
        ...
