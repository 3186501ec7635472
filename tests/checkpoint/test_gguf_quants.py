"""Dequantizing equals the gguf package bit for bit, piece by piece or whole."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.checkpoint import gguf_quants
from pagemill.checkpoint.gguf_quants import READABLE, dequantize
from pagemill.checkpoint.gguf_reader import TENSOR_TYPES
from pagemill.errors import CheckpointError
from tests.checkpoint.gguf_writing import random_bytes

SIZES = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}


def oracle(raw: np.ndarray, type_name: str) -> np.ndarray:
    plain = {"F32": np.float32, "F16": np.float16}
    data = raw.view(plain[type_name]) if type_name in plain else raw.reshape(1, -1)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    return values.astype(np.float32).reshape(-1)


@pytest.mark.parametrize("type_name", sorted(READABLE))
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40), piece=st.sampled_from([1, 512, 4096])
)
def test_random_blocks_equal_the_oracle_bit_for_bit(
    type_name: str, seed: int, blocks: int, piece: int
) -> None:
    block, size = SIZES[type_name]
    raw = random_bytes(seed, blocks * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_quants, "PIECE_ELEMENTS", piece)
        values = dequantize(raw, type_name, (blocks * block,))
    expected = oracle(raw, type_name)
    same = values.view(np.uint32) == expected.view(np.uint32)
    assert np.all(same | (np.isnan(values) & np.isnan(expected)))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16"])
def test_quantized_by_the_oracle_comes_back_close_and_in_shape(type_name: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    back = dequantize(packed.reshape(-1).view(np.uint8), type_name, (6, 64))
    assert back.shape == (6, 64)
    assert np.abs(back - values).max() < 0.5


def test_types_that_are_read_are_those_promised() -> None:
    promised = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K"
    assert set(READABLE) == set(promised.split())


def test_sizes_of_all_types_equal_the_oracle() -> None:
    known = {int(k): (k.name, *size) for k, size in gguf.GGML_QUANT_SIZES.items()}
    assert known == TENSOR_TYPES


def test_other_type_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"type IQ2_XS.*reads F32.*Q6_K"):
        dequantize(random_bytes(0, 74), "IQ2_XS", (256,))


@pytest.mark.parametrize("type_name", sorted(READABLE))
def test_temporaries_stay_small(type_name: str) -> None:
    block, size = SIZES[type_name]
    blocks = (1 << 22) // block
    raw = random_bytes(1, blocks * size)
    tracemalloc.start()
    try:
        result = dequantize(raw, type_name, (blocks * block,))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - result.nbytes < 3_000_000
