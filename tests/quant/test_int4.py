"""4-bit weights made while loading: the search, layers, memory, equal tokens in any batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill import LLM, SamplingParams, native
from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.linear import GatedLinear, Linear, QKVLinear
from pagemill.models.loader import build_meta_model, load_model
from pagemill.ops import reference
from pagemill.ops.packed import ReferenceProduct
from pagemill.quant.int4 import TABLE, Int4, quantize, quantize_in_torch
from pagemill.quant.packed import make_product, pack
from pagemill.worker.memory import weight_bytes
from tests.models.driver import generate
from tests.models.tiny import TINY, model_config, save_tiny
from tests.ops.conftest import needs_extension

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return what quantizing makes of a matrix, float32."""
    codes, scales = quantize(weight)
    return pack(codes, scales, codec="int4", group=32, table=TABLE).dequantize()


def error(weight: Tensor, other: Tensor) -> float:
    return float((other.double() - weight.double()).norm() / weight.double().norm())


# ---------------------------------------------------------------- the search


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 40), columns=st.integers(1, 200), seed=st.integers(0, 1 << 20))
def test_the_native_search_and_the_plain_one_find_the_same(
    rows: int, columns: int, seed: int
) -> None:
    weight = draw(rows, columns, seed=seed) * 0.05
    codes, scales = quantize(weight)
    plain, plain_scales = quantize_in_torch(weight)
    # Where two candidates are equally good up to rounding, either may win.
    same = (codes == plain).float().mean()
    assert float(same) > 0.97
    assert codes.shape == plain.shape and scales.shape == plain_scales.shape
    values = torch.tensor(TABLE, dtype=torch.float32)

    def back(c: Tensor, s: Tensor) -> Tensor:
        return values[c.int()] * s.repeat_interleave(32, 1)[:, :columns]

    one, two = error(weight, back(codes, scales)), error(weight, back(plain, plain_scales))
    assert one == pytest.approx(two, rel=0.02, abs=1e-4)


def test_it_is_closer_than_even_steps_of_the_largest_number() -> None:
    weight = draw(64, 512)
    groups = weight.view(64, 16, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = largest / -8
    even = ((groups / scale).round().clamp(-8, 7) * scale).view_as(weight)
    assert error(weight, rounded(weight)) < 0.88 * error(weight, even)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_tiny_and_huge_rows_keep_their_size(dtype: torch.dtype) -> None:
    weight = draw(6, 64) * torch.tensor([0.0, 1e-30, 1e-6, 1.0, 1e6, 1e30])[:, None]
    weight[3, :32] = 0.0
    weight = weight.to(dtype)
    for made in (
        rounded(weight),
        pack(*quantize_in_torch(weight), codec="int4", group=32, table=TABLE).dequantize(),
    ):
        assert not bool(made[0].any()) and not bool(made[3, :32].any())
        for row in (1, 2, 3, 4, 5):
            assert error(weight[row], made[row]) < 0.12


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_rounds_its_weights_and_takes_its_residual(dtype: torch.dtype) -> None:
    x, weights = draw(5, 40, dtype=dtype), []
    layer = QKVLinear(40, (4, 2, 7), Build(dtype, CPU, Int4()), bias=True)
    for i, part in enumerate("qkv"):
        for j, target in enumerate(layer.targets(part).values()):
            weights.append(draw(*target.shape, dtype=dtype, seed=2 * i + j))
            target.fill(weights[-1])
    layer.finish()
    matrix, bias = torch.cat(weights[0::2]), torch.cat(weights[1::2]).double()
    expected = x.double() @ rounded(matrix).double().t() + bias
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(layer.forward(x).double(), expected, atol=tolerance, rtol=tolerance)
    stream = draw(5, 56, dtype=dtype, seed=9)
    assert layer.forward(x, residual=stream) is stream
    expected += draw(5, 56, dtype=dtype, seed=9).double()
    torch.testing.assert_close(stream.double(), expected, atol=tolerance, rtol=tolerance)
    assert [n for n, _ in layer.named_parameters()] == [
        "bias", "packed_codes", "packed_scales", "packed_multipliers"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu2"])
def test_a_gate_is_applied_whether_it_is_fused_or_not(activation: str, dtype: torch.dtype) -> None:
    x, weights = draw(5, 40, dtype=dtype), []
    layer = GatedLinear(40, 21, activation, Build(dtype, CPU, Int4()), bias=False)
    for i, part in enumerate(("gate", "up")):
        weights.append(draw(21, 40, dtype=dtype, seed=i) / 6)
        layer.targets(part)["weight"].fill(weights[-1])
    layer.finish()
    both = torch.cat([rounded(weight) for weight in weights])
    sums = (x.float() @ both.t()).to(dtype)
    expected = reference.act_and_mul(sums, reference.activation(activation))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    got = layer.forward(x)
    assert got.shape == (5, 21)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_float32_and_a_tied_embedding_gives_rounded_rows(
    dtype: torch.dtype, tied: bool
) -> None:
    weights, ids = draw(37, 30, dtype=dtype), torch.tensor([36, 0, 5])
    made = Build(dtype, CPU, Int4())
    embedding = TokenEmbedding(37, 30, made)
    head = Head(embedding, made, tied=tied)
    embedding.targets("")["weight"].fill(weights)
    if not tied:
        head.targets("")["weight"].fill(weights)
    head.finish()
    rows = rounded(weights).to(dtype) if tied else weights
    assert torch.equal(embedding.forward(ids), rows[ids])
    x = draw(4, 30, dtype=dtype, seed=1)
    logits = head.forward(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ rounded(weights).t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(wrong: float) -> None:
    layer = Linear(40, 4, Build(torch.float32, CPU, Int4()))
    weight = draw(4, 40)
    weight[2, 35] = wrong
    layer.targets("")["weight"].fill(weight)
    with pytest.raises(CheckpointError, match=r"\(4, 40\) holds NaN or infinity"):
        layer.finish()
    assert not bool(quantize_in_torch(weight)[1].isfinite().all())


@needs_extension
def test_without_the_extension_the_same_numbers_come_from_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = draw(40, 64), draw(3, 64, seed=1)
    product = make_product(pack(*quantize(weight), codec="int4", group=32, table=TABLE))
    monkeypatch.setattr(native, "extension", lambda: None)
    plain = make_product(pack(*quantize(weight), codec="int4", group=32, table=TABLE))
    assert isinstance(plain, ReferenceProduct) and not isinstance(product, ReferenceProduct)
    torch.testing.assert_close(plain.apply(x), product.apply(x), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", TINY)
def test_a_family_runs_and_the_plan_counts_its_parameters(name: str, tmp_path: Path) -> None:
    save_tiny(TINY[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = model_config(checkpoint.config, quantization="int4")
    model = load_model(config, device=CPU, checkpoint=checkpoint)
    plain_model = load_model(model_config(checkpoint.config), device=CPU, checkpoint=checkpoint)
    [plain] = generate(plain_model, [[3, 1, 4, 1, 5]], 1)
    [run] = generate(model, [[3, 1, 4, 1, 5]], 1)
    assert run.logprobs != plain.logprobs  # rounded
    assert abs(run.logprobs[0] - plain.logprobs[0]) < 1.0
    meta = build_meta_model(config)
    if not any("lm_head" in info for info in checkpoint.infos()):
        assert weight_bytes(meta) == weight_bytes(model)


PROMPTS = [[5, 9, 2], list(range(3, 60)), [7], [11, 4] * 13, [100, 50, 25, 12, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(TINY["llama-tied"], path)
    return path


def answers(folder: Path, prompts: list[list[int]], **fields: Any) -> list[Any]:
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1,
        detokenize=False,
    )  # fmt: skip
    with LLM(
        str(folder), skip_tokenizer_init=True, quantization="int4", max_model_len=96,
        kv_cache_memory_bytes=1 << 20, disable_log_stats=True, **fields,
    ) as llm:  # fmt: skip
        return [
            (output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs)
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]


@needs_extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_are_equal_in_any_batch_and_chunks(folder: Path, dtype: str) -> None:
    alone = [answers(folder, [prompt], dtype=dtype)[0] for prompt in PROMPTS]
    for fields in ({}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2, "num_threads": 1}):
        assert answers(folder, PROMPTS, dtype=dtype, **fields) == alone


# ---------------------------------------------------------------- memory

_RESIDENT = """
import gc, torch
from pagemill.device.host_memory import give_back_freed
from pagemill.models.loader import load_model
from pagemill.worker.memory import weight_bytes
from tests.models.tiny import model_config

def resident():
    gc.collect()
    give_back_freed()  # else the second model may live in what the first gave back
    return int(open("/proc/self/statm").read().split()[1]) * 4096

sizes = dict(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
             num_key_value_heads=8, max_position_embeddings=128, tie_word_embeddings=True)
for layers in (1, 10):  # the first for what libraries keep
    settled = model_config({"model_type": "llama", **sizes, "num_hidden_layers": layers},
                           load_format="dummy", dtype="bfloat16", quantization="int4")
    before = resident()
    model = load_model(settled, device=torch.device("cpu"), checkpoint=None)
    taken, packed = resident() - before, weight_bytes(model)
    del model
print(taken, packed)
"""


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_model_takes_no_more_than_its_packed_size() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True
    )
    taken, packed = map(int, done.stdout.split())
    assert packed > 90 << 20
    assert packed * 0.8 < taken < packed * 1.15
