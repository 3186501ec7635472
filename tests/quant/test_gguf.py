"""GGUF's blocks kept as codes: the values of the gguf package, in one copy, for every architecture."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill.checkpoint import open_checkpoint, read_configs
from pagemill.checkpoint.gguf_blocks import BlockTensor
from pagemill.checkpoint.gguf_quants import BLOCK_FORMATS, Codes
from pagemill.checkpoint.gguf_reader import TENSOR_TYPES, read_gguf
from pagemill.errors import CheckpointError, PagemillError
from pagemill.layers.base import Build
from pagemill.layers.linear import Linear
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import build_meta_model, load_model
from pagemill.ops import LAYER_OPS
from pagemill.quant.base import LayerPart, ModuleName, Target
from pagemill.quant.gguf import GGUF, packed_format
from pagemill.quant.none import Unquantized
from pagemill.quant.packed import fill, unfilled_for
from pagemill.quant.stored import StoredWeights
from pagemill.worker.memory import weight_bytes
from tests.checkpoint.gguf_writing import gguf_names, random_bytes, write_gguf
from tests.checkpoint.test_gguf_files import FAMILIES, original
from tests.checkpoint.test_gguf_reader import EXTREMES, tiny_llama
from tests.models.driver import prompt_logits
from tests.models.tiny import model_config

CPU = torch.device("cpu")
SIZES = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}
EXACT = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def blocks_of(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random rows of blocks [rows, bytes] whose factors are ordinary float16 numbers."""
    block, size = SIZES[type_name]
    raw = random_bytes(seed, rows * columns // block * size).reshape(-1, size)
    count = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(type_name, 1)
    factors = np.random.default_rng(seed + 1).uniform(0.01, 0.2, (len(raw), count))
    place = size - 2 if type_name == "Q6_K" else 0
    raw[:, place : place + 2 * count] = factors.astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)


def oracle(raw: np.ndarray, type_name: str) -> Tensor:
    """Return the values of rows of blocks, by the gguf package."""
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    return torch.from_numpy(values.astype(np.float32))


# ---------------------------------------------------------------- one matrix


@pytest.mark.parametrize("type_name", sorted(BLOCK_FORMATS))
def test_packed_codes_stand_for_the_oracle_s_values(type_name: str) -> None:
    raw = blocks_of(type_name, 21, 512)
    blocks = BlockTensor(type_name, raw, 512, None, False)
    packed = unfilled_for(packed_format(BLOCK_FORMATS[type_name]), 21, 512, CPU)
    for start, stop in ((0, 16), (16, 21)):
        codes, scales, minima = blocks.codes(start, stop)
        fill(
            packed,
            torch.from_numpy(codes),
            torch.from_numpy(scales),
            mins=None if minima is None else torch.from_numpy(minima),
            first_row=start,
        )
    expected = oracle(raw, type_name)
    if type_name in EXACT:
        assert torch.equal(packed.dequantize(), expected)
    else:  # scales are products of two factors, rounded to float16
        largest = expected.abs().amax(1, keepdim=True)
        assert float(((packed.dequantize() - expected).abs() / largest).max()) < 2**-10


@pytest.mark.parametrize("type_name", sorted(BLOCK_FORMATS))
def test_plain_rows_are_filled_in_slices_and_in_the_model_s_order(type_name: str) -> None:
    raw = blocks_of(type_name, 4096, 512)
    order = np.random.default_rng(0).permutation(4096)
    asked: list[int] = []

    class Watched(BlockTensor):
        def values(self, start: int, stop: int) -> Tensor:
            asked.append(stop - start)
            return super().values(start, stop)

    weight = torch.zeros(4096, 512, dtype=torch.bfloat16)
    Target.of(weight).fill(Watched(type_name, raw, 512, order, False))
    expected = oracle(raw, type_name)[torch.from_numpy(order)]
    assert torch.equal(weight, expected.bfloat16())
    assert max(asked) * 512 <= 1 << 20 < 4096 * 512


def test_rows_wanted_head_by_head_or_transposed_land_in_their_places() -> None:
    raw = blocks_of("Q8_0", 24, 32)
    expected = oracle(raw, "Q8_0")
    weight = torch.zeros(24, 32)
    Target.of(weight).by_head(3, 4).fill(BlockTensor("Q8_0", raw, 32, None, False))
    assert torch.equal(weight, expected.view(4, 3, 2, 32).transpose(0, 1).reshape(24, 32))
    Target.of(weight).transposed().fill(BlockTensor("Q8_0", raw, 32, None, True))
    assert torch.equal(weight, expected)


def test_types_that_have_no_packed_form_are_refused_by_name() -> None:
    with pytest.raises(PagemillError, match=r"types\['a'\] is 'Q2_K'; types in blocks are Q8_0"):
        GGUF({"quant_method": "gguf", "types": {"a": "Q2_K"}})
    part = LayerPart(ModuleName("b", ("b", "model.b")), 0, 32)
    assert GGUF({"types": {"model.a": "Q8_0"}}).matrix(part, 64) is None
    assert GGUF({"types": {"model.b": "Q8_0"}}).matrix(part, 64) is not None


def test_codes_are_packed_in_slices_of_rows() -> None:
    raw = blocks_of("Q8_0", 8192, 512)
    asked: list[int] = []

    class Watched(BlockTensor):
        def codes(self, start: int, stop: int) -> Codes:
            asked.append(stop - start)
            return super().codes(start, stop)

    scheme = GGUF({"types": {"w": "Q8_0"}})
    build = Build(
        torch.float32, CPU, StoredWeights(scheme, Unquantized()), LAYER_OPS.load("torch")()
    )
    layer = Linear(512, 8192, build)
    layer.adopt({"": ModuleName("w", ("w",))}, build)
    layer.targets("")["weight"].fill(Watched("Q8_0", raw, 512, None, False))
    layer.finish()
    assert max(asked) * 512 <= 1 << 21 < 8192 * 512
    assert torch.equal(layer.product.matrix.dequantize(), oracle(raw, "Q8_0"))  # type: ignore[union-attr]


# ---------------------------------------------------------------- whole models


def write_model(
    path: Path, family_name: str, state: Mapping[str, Tensor], kinds: Mapping[str, str]
) -> Path:
    """Write a family's file; `kinds` maps parts of GGUF names to the types of their matrices."""
    family = FAMILIES[family_name]
    names = gguf_names(family.architecture, state, family.metadata[".block_count"])
    tensors = {names[name]: family.change(name, tensor) for name, tensor in state.items()}
    quantize = {
        name: kind
        for name, tensor in tensors.items()
        for part, kind in kinds.items()
        if part in name and tensor.dim() == 2 and tensor.shape[1] % 32 == 0
    }
    tensors |= dict(family.extra)
    return write_gguf(path, family.architecture, family.metadata, tensors, quantize=quantize)


def k_llama(path: Path) -> Path:
    """Write a small model whose matrices are of the K types, of random blocks with ordinary factors."""
    torch.manual_seed(0)
    shapes = {
        "token_embd": (10, 256, "Q6_K"), "blk.0.attn_q": (256, 256, "Q4_K"),
        "blk.0.attn_k": (128, 256, "Q4_K"), "blk.0.attn_v": (128, 256, "Q6_K"),
        "blk.0.attn_output": (256, 256, "Q5_K"), "blk.0.ffn_gate": (256, 256, "Q5_K"),
        "blk.0.ffn_up": (256, 256, "Q5_K"), "blk.0.ffn_down": (256, 256, "Q4_K"),
    }  # fmt: skip
    metadata = {
        ".embedding_length": 256, ".block_count": 1, ".feed_forward_length": 256,
        ".attention.head_count": 2, ".attention.head_count_kv": 1, ".context_length": 128,
        ".attention.layer_norm_rms_epsilon": 1e-5, ".rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(10)],
        "tokenizer.ggml.token_type": [1] * 10,
    }  # fmt: skip
    norms = {
        f"{name}_norm.weight": torch.rand(256) + 0.5
        for name in ("output", "blk.0.attn", "blk.0.ffn")
    }
    blocks = {
        f"{name}.weight": (kind, blocks_of(kind, rows, columns, seed=rows))
        for name, (rows, columns, kind) in shapes.items()
    }
    return write_gguf(path, "llama", metadata, norms, blocks=blocks)


def load(path: Path, quantization: str | None, dtype: str = "float32") -> DecoderLM:
    checkpoint = open_checkpoint(path)
    config = model_config(checkpoint.config, quantization=quantization, dtype=dtype)
    return load_model(config, device=CPU, checkpoint=checkpoint)


KINDS = {
    "llama3": {"attn_": "Q4_0", "attn_v": "Q8_0", "ffn": "Q4_1", "token_embd": "Q5_1"},
    "llama with biases": {"attn_q": "Q5_0", "attn_k": "Q5_0", "ffn": "Q8_0"},
    "qwen3": {"attn_": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q5_0", "output": "Q8_0"},
    "gemma3": {"attn_": "Q4_0", "ffn": "Q8_0", "token_embd": "Q8_0"},
    "gpt2": {"attn_": "Q4_0", "ffn": "Q8_0"},
    "gptneox": {"attn_": "Q4_1", "ffn_up": "Q8_0"},
    "phi3 plain": {"attn_": "Q8_0", "ffn_up": "Q4_0"},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_mixed_types_computes_what_its_plain_weights_do(
    name: str, tmp_path: Path
) -> None:
    _, state = original(FAMILIES[name])
    path = write_model(tmp_path / "x.gguf", name, state, KINDS[name])
    plain, packed = load(path, None), load(path, "gguf")
    expected = prompt_logits(plain, PROMPT)
    found = prompt_logits(packed, PROMPT)
    torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.std()), rtol=1e-4)
    config = model_config(open_checkpoint(path).config, quantization="gguf")
    assert weight_bytes(build_meta_model(config)) == weight_bytes(packed)
    assert weight_bytes(packed) < weight_bytes(plain)


def test_a_model_of_k_types_computes_what_its_plain_weights_do(tmp_path: Path) -> None:
    path = k_llama(tmp_path / "x.gguf")
    expected = prompt_logits(load(path, None), [3, 1, 4, 1, 5])
    found = prompt_logits(load(path, "gguf"), [3, 1, 4, 1, 5])
    torch.testing.assert_close(found, expected, atol=1e-2 * float(expected.std()), rtol=1e-2)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_factor_of_a_k_type_that_is_no_number_is_refused_with_its_matrix(
    kind: str, tmp_path: Path
) -> None:
    path = k_llama(tmp_path / "x.gguf")
    tensors = read_gguf(path).tensors
    name = next(
        name for name, tensor in tensors.items() if tensor.type_name == kind and "blk" in name
    )
    raw = bytearray(path.read_bytes())
    place = tensors[name].offset + (SIZES[kind][1] - 2 if kind == "Q6_K" else 0)
    raw[place : place + 2] = struct.pack("<H", 0x7E00)
    path.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\..*: the scales of rows 0 to .* hold NaN"
    ):
        load(path, "gguf")


def test_parts_of_one_type_share_a_product_and_others_lie_beside_them(tmp_path: Path) -> None:
    _, state = original(FAMILIES["llama3"])
    kinds = {"attn_": "Q4_0", "attn_v": "Q8_0", "ffn": "Q4_1"}
    layer: Any = load(write_model(tmp_path / "x.gguf", "llama3", state, kinds), "gguf").layers[0]
    assert len([m for m in layer.attention.qkv.children()]) == 2
    assert list(layer.mlp.gate_up.children()) == []
    assert layer.mlp.gate_up.product.matrix.parts == 2


def test_configuration_names_the_types_without_reading_data(tmp_path: Path) -> None:
    _, state = original(FAMILIES["llama3"])
    path = write_model(tmp_path / "x.gguf", "llama3", state, {"attn_v": "Q8_0"})
    config, _ = read_configs(path)
    assert config["quantization_config"]["quant_method"] == "gguf"
    assert config["quantization_config"]["types"] == {
        f"model.layers.{i}.self_attn.v_proj": "Q8_0" for i in range(4)
    }


# ---------------------------------------------------------------- bad files


@pytest.fixture(scope="module", params=[tiny_llama, k_llama])
def small_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bytes, int]:
    """Return a scratch path, the bytes of a small model in blocks, and where its data begin."""
    path = request.param(tmp_path_factory.mktemp("fuzz") / "x.gguf")
    start = min(t.offset for t in read_gguf(path).tensors.values())
    return path, path.read_bytes(), start


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_file_of_lies_loads_or_is_refused_and_takes_no_memory(
    small_file: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    path, original_bytes, start = small_file
    raw = bytearray(original_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):  # numbers anywhere in the data: scales that are not finite
            place = data.draw(st.integers(start, len(raw) - 2))
            raw[place : place + 2] = struct.pack(
                "<H", data.draw(st.sampled_from([0x7C00, 0x7E00, 0]))
            )
            continue
        place, width = data.draw(st.integers(0, start - 8)), data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from(EXTREMES)) % 2 ** (8 * width)
        raw[place : place + width] = value.to_bytes(width, "little")
    path.write_bytes(raw)
    try:
        model = load(path, "gguf" if "types" in str(read_configs(path)[0]) else None)
    except PagemillError:
        return
    assert weight_bytes(model) < 1 << 21
