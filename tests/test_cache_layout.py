"""Kinds of layers: what each needs of a sequence, and how one pool of equal blocks serves them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.cache_layout import CacheKind, CacheLayout, cache_layout, plain_layout
from pagemill.config import LayerShape, ModelShape

USUAL = settings(deadline=None, max_examples=200)


def shape(*windows: int | None, heads: tuple[int, ...] = ()) -> ModelShape:
    """Return a model with a layer a window."""
    layers = tuple(
        LayerShape(num_kv_heads=heads[i] if heads else 1, head_dim=8, sliding_window=window)
        for i, window in enumerate(windows)
    )
    return ModelShape(
        hidden_size=8, intermediate_size=8, num_heads=1, vocab_size=8, layers=layers,
        max_position=1 << 20,
    )  # fmt: skip


def layout(model: ModelShape, max_model_len: int = 8192, **change: int | bool) -> CacheLayout:
    sizes = {"block_size": 16, "max_num_tokens": 2048, **change}
    return cache_layout(model, max_model_len=max_model_len, **sizes)  # type: ignore[arg-type]


def gemma(num_windowed: int, num_full: int, window: int = 512) -> ModelShape:
    return shape(*[window] * num_windowed, *[None] * num_full)


# ---------------------------------------------------------------- what a kind needs


@USUAL
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 60))
def test_what_a_token_sees_lies_behind_its_first_block(
    size: int, window: int, position: int
) -> None:
    kind = CacheKind(block_tokens=size, window=window)
    seen = {key // size for key in range(max(0, position - window + 1), position + 1)}
    assert kind.first_block(position) == min(seen)


@USUAL
@given(
    st.integers(1, 9), st.one_of(st.none(), st.integers(1, 12)), st.integers(1, 7),
    st.integers(0, 20), st.lists(st.integers(1, 7), max_size=12),
)  # fmt: skip
def test_no_step_holds_more_than_was_promised(
    size: int, window: int | None, chunk: int, start: int, steps: list[int]
) -> None:
    kind = CacheKind(block_tokens=size, window=window, chunk=chunk)
    shares = [min(step, chunk) for step in steps]
    end = start + sum(shares)
    at = start
    for share in shares:
        held = kind.blocks_of(at + share) - kind.first_block(at)
        assert held <= kind.most_held(start, end)
        at += share
        assert kind.num_held(at) <= kind.most_held(start, end)


def test_a_window_stops_growing_and_full_layers_do_not() -> None:
    windowed = CacheKind(block_tokens=16, window=512, chunk=512)
    full = CacheKind(block_tokens=16)
    assert windowed.most_held(0, 10_000) == windowed.most_held(0, 100_000) == 65
    assert full.most_held(0, 100_000) == 6250


@USUAL
@given(st.integers(0, 300), st.integers(1, 6), st.integers(1, 40))
def test_the_longest_request_fits_and_a_longer_one_does_not(
    num_blocks: int, times: int, window: int
) -> None:
    made = CacheLayout(
        (CacheKind(block_tokens=4 * times), CacheKind(block_tokens=4, window=window, chunk=2))
    )
    most = made.most_tokens(num_blocks)
    assert made.blocks_of_request(most) <= num_blocks < made.blocks_of_request(most + 1)


# ---------------------------------------------------------------- how a pool is cut


@pytest.mark.parametrize(
    ("num_windowed", "num_full", "cells", "sizes"),
    [
        (15, 3, 15, (80, 16)),  # Gemma 3 270M
        (22, 4, 24, (96, 16)),  # 1B
        (29, 5, 30, (96, 16)),  # 4B
        (40, 8, 40, (80, 16)),  # 12B
        (13, 13, 13, (16, 16)),  # Gemma 2 2B
        (7, 21, 21, (16, 48)),
    ],
)
def test_blocks_of_few_layers_hold_more_tokens(
    num_windowed: int, num_full: int, cells: int, sizes: tuple[int, int]
) -> None:
    made = layout(gemma(num_windowed, num_full))
    assert made.cells == cells
    assert tuple(kind.block_tokens for kind in made.kinds) == sizes
    assert [kind.window for kind in made.kinds] == [None, 512]


@USUAL
@given(st.lists(st.sampled_from([None, 8, 24, 100]), min_size=1, max_size=24))
def test_every_layer_has_a_place_of_its_own_in_a_block(windows: list[int | None]) -> None:
    made = layout(shape(*windows), 4096)
    assert sorted(layer for kind in made.kinds for layer in kind.layers) == list(
        range(len(windows))
    )
    for kind in made.kinds:
        assert {windows[layer] for layer in kind.layers} == {kind.window}
        if len(made.kinds) > 1:
            assert len(kind.layers) <= kind.places
            assert kind.places * kind.block_tokens == made.cells * 16, "blocks of unequal bytes"


def test_all_layers_with_one_window_have_one_table() -> None:
    made = layout(shape(*[4096] * 32), 32768)
    (kind,) = made.kinds
    assert (kind.block_tokens, kind.window, kind.places) == (16, 4096, 1)
    assert made.blocks_at_rest(32768) * 7 < plain_layout(16).blocks_at_rest(32768)


@pytest.mark.parametrize(
    "made",
    [
        layout(shape(None, None, None)),
        layout(gemma(15, 3), 512),  # no window is shorter than the context
        layout(gemma(15, 3), follows=True),
        layout(gemma(3, 1, 8), 64, block_size=32),  # two blocks each would be more
        layout(shape(512, None, heads=(1, 2))),  # cells of unequal bytes
    ],
)
def test_one_table_for_all_where_windows_save_nothing(made: CacheLayout) -> None:
    (kind,) = made.kinds
    assert kind.window is None and kind.block_tokens in (16, 32) and kind.places == 1
    assert not made.lets_go


def test_a_window_as_long_as_the_context_is_none() -> None:
    kinds = layout(shape(512, 8192, None)).kinds
    assert [(kind.window, kind.layers) for kind in kinds] == [(None, (1, 2)), (512, (0,))]


@pytest.mark.parametrize("length", [8192, 32768])
@pytest.mark.parametrize(
    ("model", "times"), [(gemma(15, 3), 4), (gemma(22, 4), 4), (gemma(29, 5, 1024), 3)]
)
def test_several_times_as_many_tokens_fit_a_model_with_windows(
    model: ModelShape, times: int, length: int
) -> None:
    made = layout(model, length)
    memory = 100_000  # cells
    whole = memory // model.num_layers * 16
    requests = made.requests_that_fit(memory // made.cells, length)
    assert requests * length > times * whole


def test_a_layout_is_described_by_what_a_block_holds() -> None:
    assert plain_layout(16).describe() == "16 tokens a block"
    assert layout(gemma(15, 3)).describe() == (
        "80 tokens of 3 layers that see all or 16 tokens of 15 layers that see 512 in 15 cells a block"
    )
