"""Outputs of one request that wait for their reader, who may be slow, or gone without a word.

A reader that keeps up gets every output as it was made. For one that does not, outputs become one: what is
told in pieces (`RequestOutputKind.DELTA`) is joined, of what is told from the beginning each time the last
remains. So what waits costs no more than its tokens, and a reader misses nothing but the moments. There is an
end to that too. One step may tell more than `MOST_WAITING` tokens and alternatives (a whole vocabulary, of
several samples), so size alone says nothing of a reader: when more than that waits, nothing was taken for
`PATIENCE_S` seconds, and there are news again, nobody is reading, and the request has to end. So it has where
more than `MOST_FOR_A_READER` wait for one who takes them too slowly. Never does more wait than that and the
news of one step.

One is owned by each stream of `engine.async_engine`, which puts and takes in the stream's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pagemill.errors import PagemillError, RequestError
from pagemill.outputs import CompletionOutput, RequestOutput
from pagemill.sampling_params import RequestOutputKind

# So many wait as they were made: a reader that other work holds up for a moment sees no difference.
MOST_APART = 32
# Tokens, and alternatives told with them, that wait for nobody: some ten megabytes without alternatives.
MOST_WAITING = 1 << 18
# Longer than it takes to write out the news of one step, during which nothing is taken.
PATIENCE_S = 10.0
# The same for a reader who takes some now and then: about a gigabyte of alternatives.
MOST_FOR_A_READER = 1 << 22

Item = RequestOutput | PagemillError


class Mailbox:
    """Used in the event loop that it was made in, by one reader."""

    __slots__ = (
        "_arrived", "_clock", "_is_delta", "_items", "_num_waiting", "_overflowed", "_since", "loop"
    )  # fmt: skip

    def __init__(
        self, kind: RequestOutputKind, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._clock = clock
        self._since = clock()  # when something was taken, or began to wait
        self._is_delta = kind is RequestOutputKind.DELTA
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._num_waiting = 0  # tokens and alternatives
        self._overflowed = False

    def put(self, item: Item) -> bool:
        """Add an output, or the error that ends the stream; False: nobody reads, end the request.

        After that the reader finds an error, and nothing more is taken.
        """
        if self._overflowed:
            return True
        if not self._items:
            self._since = self._clock()
        self._arrived.set()
        if not isinstance(item, RequestOutput):
            self._items.append(item)
            return True
        ends = self._end()
        if ends is None:
            self._add(item)
            return True
        self._overflowed = True
        self._items.clear()
        self._items.append(ends)
        return False

    async def take(self) -> Item:
        """Wait for the next output, or the error that ends the stream."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        self._since = self._clock()
        if self._is_delta and isinstance(item, RequestOutput):
            self._num_waiting -= _size(item)
        return item

    def _end(self) -> RequestError | None:
        """Return the error to end the request with, by what waits before its latest news."""
        if self._num_waiting <= MOST_WAITING:
            return None
        idle_s = self._clock() - self._since
        if idle_s < PATIENCE_S and self._num_waiting <= MOST_FOR_A_READER:
            return None
        if idle_s < PATIENCE_S:
            limit = f"at most {MOST_FOR_A_READER} may"
        else:
            limit = f"at most {MOST_WAITING} may where nothing is read for {PATIENCE_S:g} s"
        return RequestError(
            f"the request was ended: {self._num_waiting} tokens and alternatives of its output were "
            f"waiting to be read, and {limit}; read the stream faster, or ask for fewer logprobs or samples"
        )

    def _add(self, output: RequestOutput) -> None:
        if self._is_delta:
            self._num_waiting += _size(output)
        last = self._items[-1] if len(self._items) >= MOST_APART else None
        if not isinstance(last, RequestOutput):
            self._items.append(output)
        elif self._is_delta:
            _join(last, output)
        else:
            self._items[-1] = output


def _size(output: RequestOutput) -> int:
    """Return the tokens of an output and the alternatives that are told with them."""
    size = 0
    for sample in output.outputs:
        size += len(sample.token_ids)
        if sample.logprobs:
            size += sum(map(len, sample.logprobs))
    return size


def _join(first: RequestOutput, second: RequestOutput) -> None:
    """Make two outputs of news one, the first: nobody else has it yet."""
    by_index = {sample.index: sample for sample in first.outputs}
    for sample in second.outputs:
        known = by_index.get(sample.index)
        if known is None:
            first.outputs.append(sample)
        else:
            _join_samples(known, sample)
    if first.prompt_logprobs is None:
        first.prompt_logprobs = second.prompt_logprobs
    first.finished = second.finished
    first.metrics = second.metrics
    first.num_cached_tokens = second.num_cached_tokens
    first.error = second.error
    first.timed_out = second.timed_out
    first.num_discarded_tokens += second.num_discarded_tokens


def _join_samples(first: CompletionOutput, second: CompletionOutput) -> None:
    first.text += second.text
    first.token_ids += second.token_ids
    if second.logprobs is not None:
        first.logprobs = first.logprobs or []
        first.logprobs += second.logprobs
    first.cumulative_logprob = second.cumulative_logprob
    first.finish_reason = second.finish_reason
    first.stop_reason = second.stop_reason
    first.seed = second.seed
