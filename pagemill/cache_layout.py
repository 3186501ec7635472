"""How the KV cache is cut into blocks: which layers share a table, and how many tokens a block of theirs holds.

A *kind* is the set of layers with one sliding window; each kind has a table of its own, so that layers
which see a window only let go of what lies behind it. All blocks have equal bytes and come from one pool:
a block is a number of cells, each `block_size` tokens of one layer, and a kind of few layers uses them for more
tokens (docs/decisions/013).

    15 windowed layers, 3 full ones:    15 cells a block
        windowed    15 layers x  1 cell     16 tokens a block
        full         3 layers x  5 cells    80 tokens a block

Made from a model's shape by `cache_layout`; read by the memory plan and the KV store (where a layer lies in a
block) and by the planning wing (how many blocks a sequence needs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.config import EngineConfig, ModelShape

# A found prefix ends where blocks of all kinds end: at most so many cells apart.
_MOST_CELLS_APART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """Layers that need the same tokens of a sequence. Positions and counts are of tokens."""

    block_tokens: int  # that a block holds, in each layer of the kind
    window: int | None = None  # keys a query sees, itself included; None: all
    layers: tuple[int, ...] = ()  # of the model
    places: int = 1  # layers that have room in a block; 1 where each layer has a pool of its own
    chunk: int = 1  # tokens of a step that a sequence is promised; a window's alone asks for it

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks hold positions [0, num_tokens)."""
        return -(-num_tokens // self.block_tokens)

    def first_block(self, position: int) -> int:
        """Return the first block that a token at `position`, or after it, reads."""
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // self.block_tokens

    def num_held(self, num_computed: int) -> int:
        """Return how many blocks a sequence with so many computed tokens needs to go on."""
        return self.blocks_of(num_computed) - self.first_block(num_computed)

    def most_held(self, start: int, end: int) -> int:
        """Return the most blocks that computing positions [start, end) takes at once."""
        count = self.blocks_of(end) - self.first_block(start)
        if self.window is None:
            return count
        return min(count, _most_touched(self.window - 1 + self.chunk, self.block_tokens))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The kinds of one cache; the one that needs tokens longest comes first."""

    kinds: tuple[CacheKind, ...]
    cells: int = (
        1  # of a block, where there are several kinds; each is `block_size` tokens of a layer
    )

    @property
    def lets_go(self) -> bool:
        """Return whether some kind needs a window only."""
        return any(kind.window is not None for kind in self.kinds)

    @property
    def step_tokens(self) -> int:
        """Return the tokens between two positions at which blocks of all kinds end."""
        return math.lcm(*(kind.block_tokens for kind in self.kinds))

    @property
    def num_blocks_each(self) -> float:
        """Return how many blocks the tokens of one block of the first kind take in all kinds."""
        return sum(self.kinds[0].block_tokens / kind.block_tokens for kind in self.kinds)

    def block_layers(self, num_layers: int) -> int:
        """Return how many layers' `block_size` tokens a block has room for, of a model of so many."""
        return num_layers if len(self.kinds) == 1 else self.cells

    def blocks_of_request(self, num_tokens: int) -> int:
        """Return the most blocks that one request of so many tokens takes at once."""
        return sum(kind.most_held(0, num_tokens) for kind in self.kinds)

    def blocks_at_rest(self, num_tokens: int) -> int:
        """Return how many of them it holds between two steps, at most."""
        return sum(
            kind.blocks_of(num_tokens)
            if kind.window is None
            else min(kind.blocks_of(num_tokens), _most_touched(kind.window, kind.block_tokens))
            for kind in self.kinds
        )

    def most_tokens(self, num_blocks: int) -> int:
        """Return the tokens of the longest request that a pool of so many blocks can serve.

        Where all kinds have windows there is no longest one: then what the pool holds.
        """
        low, high = 0, num_blocks * max(kind.block_tokens for kind in self.kinds)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of_request(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def requests_that_fit(self, num_blocks: int, num_tokens: int) -> float:
        """Return how many requests of `num_tokens` tokens a pool holds, one of them computing a chunk."""
        at_rest = self.blocks_at_rest(num_tokens)
        chunk = self.blocks_of_request(num_tokens) - at_rest
        return max(0, num_blocks - chunk) / at_rest

    def describe(self) -> str:
        """Return what the bytes of a block are, in words."""
        if len(self.kinds) == 1:
            return f"{self.kinds[0].block_tokens} tokens a block"
        parts = [
            f"{kind.block_tokens} tokens of {len(kind.layers)} layers that see "
            + ("all" if kind.window is None else f"{kind.window}")
            for kind in self.kinds
        ]
        return f"{' or '.join(parts)} in {self.cells} cells a block"


def plain_layout(block_size: int, num_layers: int = 1, window: int | None = None) -> CacheLayout:
    """Return the layout in which all layers share one table."""
    layers = tuple(range(num_layers))
    return CacheLayout((CacheKind(block_tokens=block_size, window=window, layers=layers),))


def layout_of(config: EngineConfig) -> CacheLayout:
    """Return the layout of the cache that an engine has."""
    speculative = config.speculative
    return cache_layout(
        config.model.shape,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        follows=speculative is not None and speculative.draft_model is not None,
    )


def cache_layout(
    shape: ModelShape,
    *,
    block_size: int,
    max_model_len: int,
    max_num_tokens: int,
    follows: bool = False,
) -> CacheLayout:
    """Return the layout for a model whose sequences have at most `max_model_len` tokens.

    `max_num_tokens` is the budget of a step. `follows`: a draft model's cache follows the blocks, so that all
    tokens of a sequence keep theirs. The layout is plain as well where splitting saves nothing.
    """
    plain = plain_layout(block_size, shape.num_layers)
    windows: dict[int | None, list[int]] = {}
    for index, layer in enumerate(shape.layers):
        window = layer.sliding_window
        if window is not None and window >= max_model_len:
            window = None
        windows.setdefault(window, []).append(index)
    if follows or set(windows) == {None}:
        return plain
    alike = len({(layer.num_kv_heads, layer.head_dim) for layer in shape.layers}) == 1
    if len(windows) > 1 and not alike:
        return plain
    order = sorted(windows, key=lambda window: -math.inf if window is None else -window)
    cells = _cells([len(windows[window]) for window in order])
    kinds = []
    for window in order:
        each = _cells_each(cells, len(windows[window]))
        kinds.append(
            CacheKind(
                block_tokens=each * block_size if len(order) > 1 else block_size,
                window=window,
                layers=tuple(windows[window]),
                places=cells // each if len(order) > 1 else 1,
                chunk=1 if window is None else min(max_num_tokens, window),
            )
        )
    layout = CacheLayout(tuple(kinds), cells)
    whole = plain.blocks_of_request(max_model_len)
    if len(kinds) == 1:
        return layout if layout.blocks_at_rest(max_model_len) < whole else plain
    longest = layout.blocks_of_request(max_model_len) * cells  # both in cells
    return layout if longest < whole * shape.num_layers else plain


def _most_touched(num_tokens: int, block_tokens: int) -> int:
    """Return the most blocks that so many tokens in a row lie in, wherever they begin."""
    return (num_tokens + block_tokens - 2) // block_tokens + 1


def _cells(counts: Sequence[int]) -> int:
    """Return how many cells a block has: the kind that wastes most of them wastes least."""

    def waste(cells: int) -> float:
        each = [_cells_each(cells, count) for count in counts]
        if math.lcm(*each) > _MOST_CELLS_APART:
            return math.inf
        return max(1 - one * count / cells for one, count in zip(each, counts, strict=True))

    return min(range(max(counts), 2 * max(counts) + 1), key=waste)


def _cells_each(cells: int, num_layers: int) -> int:
    """Return how many cells each of so many layers has in a block: a divisor, so that places are even."""
    return max(each for each in range(1, cells // num_layers + 1) if cells % each == 0)
