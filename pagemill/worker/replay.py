"""Steps of few tokens without Python between the kernels: recorded once, then replayed.

In decoding one sequence, Python would take more time between the native calls than some of them do. So
the calls of a forward pass, from the embedding to the last norm or, where every token is sampled from, to
the logits, are recorded with the addresses they use (csrc/tape), and made again in one call for every
later step of as many tokens. Token ids and positions are copied to where the recording has them;
attention gets the new step's plan.

While it is recorded, a pass gets its temporary tensors from an arena that stays. A recording is used
only after it has given, from an arena full of NaN, the bits that the plain pass gave: whatever a model
does between its native calls is noticed, and that model is run plainly. Owned by the worker.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill import native
from pagemill.attention.base import StepAttention
from pagemill.attention.cpu import CPUAttention, CPUPlan
from pagemill.log import get_logger
from pagemill.models.base import CausalLM
from pagemill.worker.forward import PlainForward

logger = get_logger(__name__)

# Of token ids, positions and attention; see `worker.forward.Forward`.
Pass = Callable[[Tensor, Tensor, StepAttention], Tensor]

MAX_TOKENS = 64  # of a recorded step: in larger ones Python's share is small
MAX_LOGIT_ROWS = 16  # of one that is recorded through to logits: they would take much of the arena
_SEEN_FIRST = 8  # plain steps of as many tokens before one is recorded: it costs three steps
_ALIGNMENT = 64


def arena_bytes(model: CausalLM) -> int:
    """Return the memory that recordings keep: the temporaries of their largest steps, and slack."""
    hidden = 2 * model.peak_bytes(MAX_TOKENS, 0)
    return hidden + model.peak_bytes(MAX_LOGIT_ROWS, MAX_LOGIT_ROWS) + (1 << 16)


class ReplayedForward:
    """A `Forward` that replays what it can."""

    def __init__(self, model: CausalLM, backend: CPUAttention) -> None:
        arena = _Arena(arena_bytes(model))
        self._model = model
        self._plain = plain = PlainForward(model)
        self._hidden = _ReplayedPass(plain.hidden, MAX_TOKENS, backend, arena)
        self._logits = _ReplayedPass(plain.logits, MAX_LOGIT_ROWS, backend, arena)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layers; a recording knows no rows, so that those are picked from its result."""
        if not self._hidden.takes(len(token_ids)):
            return self._plain.hidden(token_ids, positions, attend, rows)
        hidden = self._hidden.run(token_ids, positions, attend)
        return hidden if rows is None else hidden.index_select(0, rows)

    def logits(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Run the layers and the head; the layers alone are replayed where the head cannot be."""
        if self._logits.takes(len(token_ids)):
            return self._logits.run(token_ids, positions, attend)
        hidden = self._hidden.run(token_ids, positions, attend)
        with torch.inference_mode():
            return self._model.logits(hidden)

    @property
    def recorded_counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of tokens whose steps are replayed: to hidden states, and to logits."""
        return self._hidden.recorded_counts, self._logits.recorded_counts


class _ReplayedPass:
    """One of the two passes of a model: run plainly, recorded or replayed, by the number of tokens."""

    def __init__(self, plain: Pass, most_tokens: int, backend: CPUAttention, arena: _Arena) -> None:
        self._plain = plain
        self._most_tokens = most_tokens
        self._backend = backend
        self._arena = arena
        self._seen: Counter[int] = Counter()
        self._recordings: dict[int, _Recording] = {}
        self._records = True

    def takes(self, count: int) -> bool:
        """Return whether steps of so many tokens are, or may come to be, replayed."""
        return self._records and count <= self._most_tokens

    def run(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Return the pass's result, valid until the next run of any pass."""
        count = len(token_ids)
        recording = self._recordings.get(count)
        if recording is not None:
            return recording.replay(token_ids, positions, attend)
        if self.takes(count):
            self._seen[count] += 1
            if self._seen[count] > _SEEN_FIRST:
                return self._record(token_ids, positions, attend)
        return self._plain(token_ids, positions, attend)

    @property
    def recorded_counts(self) -> tuple[int, ...]:
        """Return the numbers of tokens whose steps are replayed."""
        return tuple(sorted(self._recordings))

    def _record(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Run plainly, note the calls, and keep them if they do the same again."""
        recording = _Recording(self._backend, token_ids, positions)
        foreign = recording.record(self._plain, self._arena, attend)
        result = recording.result.clone()
        if foreign is None:
            self._arena.scribble()
            again = recording.replay(token_ids, positions, attend)
            if torch.equal(_bits(again), _bits(result)):
                self._recordings[len(token_ids)] = recording
                return result
            foreign = "something that is neither torch's nor recorded"
            # The replay may have written other keys and values than the pass.
            result = self._plain(token_ids, positions, attend)
        self._records = False
        logger.debug("steps are not replayed: between native calls the model runs %s", foreign)
        return result


class _Recording:
    """The calls of one pass, and where its inputs and its result are."""

    def __init__(self, backend: CPUAttention, token_ids: Tensor, positions: Tensor) -> None:
        self._backend = backend
        self._token_ids, self._positions = token_ids.clone(), positions.clone()
        self._tape = native.required().Tape(
            self._token_ids.data_ptr(), self._positions.data_ptr(), len(token_ids)
        )
        self.result = torch.empty(0)

    def record(self, plain: Pass, arena: _Arena, attend: StepAttention) -> str | None:
        """Run the pass; return what it did beside native calls, if anything."""
        with _Watch(arena) as watch:
            self._tape.start()
            try:
                self.result = plain(self._token_ids, self._positions, attend)
            finally:
                self._tape.stop()
        foreign: str | None = watch.foreign
        return foreign

    def replay(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor:
        """Return the result of a step of as many tokens."""
        assert token_ids.dtype == positions.dtype == torch.int64
        assert token_ids.is_contiguous() and positions.is_contiguous()
        plans: list[CPUPlan] = attend.plans
        natives = [plan.native for plan in plans]
        while True:
            scratch = self._backend.scratch
            needed = self._tape.replay(
                token_ids.data_ptr(), positions.data_ptr(), natives, scratch.data_ptr(),
                scratch.numel(),
            )  # fmt: skip
            if not needed:
                return self.result
            self._backend.grow_scratch(needed)


class _Arena:
    """Memory for the temporary tensors of recorded passes, which all use the same."""

    def __init__(self, size_bytes: int) -> None:
        # Fresh pages: what is never written takes no memory.
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._size = size_bytes
        self._used = 0  # high-water mark
        self._live: list[tuple[int, int, StorageWeakRef]] = []  # start, end; sorted

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return an unfilled tensor where no live one lies, or None when there is no room."""
        numbers = 1
        for length in shape:
            numbers *= length
        if not numbers:
            return torch.empty(tuple(shape), dtype=dtype)
        size = -(-numbers * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._live = [part for part in self._live if not part[2].expired()]  # type: ignore[no-untyped-call]
        start = 0
        for begin, end, _ in self._live:
            if begin - start >= size:
                break
            start = end
        if start + size > self._size:
            return None
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numbers, offset=start)
        ref = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        self._live.append((start, start + size, ref))
        self._live.sort(key=lambda part: part[0])
        self._used = max(self._used, start + size)
        return flat.view(tuple(shape))

    def scribble(self) -> None:
        """Fill all that was ever used with NaN, in either dtype."""
        self._memory[: self._used] = b"\xff" * self._used

    def release(self) -> None:
        """Let the next pass use all of the memory again."""
        self._live.clear()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives tensors from the arena, and notices operations that a recording would leave out."""

    def __init__(self, arena: _Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        arena.release()
        self._arena = arena
        self.foreign: str | None = None  # the first such operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say torch that this needs no shield from its compiler: raising it imports all of that.

        The import would hold up one step, in the middle of serving, for more than a second.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            tensor = self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
            if tensor is not None:
                return tensor
        result = func(*args, **kwargs)
        if not (func.is_view and _shares(args[0], result)):
            self.foreign = self.foreign or str(func)
        return result


def _shares(tensor: Tensor, result: Any) -> bool:
    """Return whether a result, one tensor or several, is the memory of another."""
    home = tensor.untyped_storage().data_ptr()
    results = result if isinstance(result, (list, tuple)) else [result]
    return all(part.untyped_storage().data_ptr() == home for part in results)


def _bits(tensor: Tensor) -> Tensor:
    """Return the tensor as whole numbers: NaN equals itself."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
