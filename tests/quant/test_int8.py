"""int8 weights on layers: both stores alike, one copy in memory, equal tokens in any batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemill import LLM, SamplingParams
from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.linear import GatedLinear, Linear, QKVLinear
from pagemill.models.loader import build_meta_model, load_model
from pagemill.ops import reference
from pagemill.ops.reference import Int8Rounding
from pagemill.quant.int8 import Int8, Int8Layers, Int8Store, store_at_hand
from pagemill.quant.int8_torch import TorchInt8Store
from pagemill.worker.memory import weight_bytes
from tests.models.driver import generate
from tests.models.tiny import TINY, model_config, save_tiny
from tests.ops.conftest import needs_extension

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stores() -> list[Int8Store]:
    """Return the plain store, and the native one where it is built."""
    return [TorchInt8Store(), store_at_hand()]


def build(store: Int8Store, dtype: torch.dtype) -> Build:
    return Build(dtype, CPU, Int8(store))


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_rounds_its_weights_and_takes_its_residual(dtype: torch.dtype) -> None:
    x, results = draw(5, 33, dtype=dtype), []
    exact = torch.empty(0)
    for store in stores():
        layer, weights = QKVLinear(33, (4, 2, 7), build(store, dtype), bias=True), []
        for i, part in enumerate("qkv"):
            targets = layer.targets(part)
            for j, target in enumerate(targets.values()):
                weights.append(draw(*target.shape, dtype=dtype, seed=2 * i + j))
                target.fill(weights[-1])
        layer.finish()
        matrix, bias = torch.cat(weights[0::2]).double(), torch.cat(weights[1::2]).double()
        exact = x.double() @ matrix.t() + bias
        stream = draw(5, 56, dtype=dtype, seed=9)
        results.append(layer.forward(x))
        assert layer.forward(x, residual=stream) is stream
        close(stream, results[-1] + draw(5, 56, dtype=dtype, seed=9))
    assert torch.equal(results[0], results[1])
    error = (results[0].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-3 < float(error) < 2e-2  # rounded, and not far


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu2"])
def test_a_gate_is_applied_whether_the_kernel_knows_it_or_not(
    activation: str, dtype: torch.dtype
) -> None:
    x, results = draw(5, 33, dtype=dtype), []
    for store in stores():
        layer = GatedLinear(33, 21, activation, build(store, dtype), bias=True)
        for i, part in enumerate(("gate", "up")):
            for target in layer.targets(part).values():
                target.fill(draw(*target.shape, dtype=dtype, seed=i) / 6)
        layer.finish()
        results.append(layer.forward(x))
    assert results[1].shape == (5, 21)
    close(results[1], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_float32_and_a_tied_embedding_gives_rounded_rows(
    dtype: torch.dtype, tied: bool
) -> None:
    weights, ids, x = (
        draw(37, 30, dtype=dtype),
        torch.tensor([36, 0, 5]),
        draw(4, 30, dtype=dtype, seed=1),
    )
    codes, scales, _ = reference.int8_codes(weights)
    for store in stores():
        made = build(store, dtype)
        embedding = TokenEmbedding(37, 30, made)
        head = Head(embedding, made, tied=tied)
        embedding.targets("")["weight"].fill(weights)
        if not tied:
            head.targets("")["weight"].fill(weights)
        head.finish()
        rows = (codes.float() * scales).to(dtype) if tied else weights
        assert torch.equal(embedding.forward(ids), rows[ids])
        logits = head.forward(x)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, reference.linear_int8(x, codes, scales.squeeze(1)))


@pytest.mark.parametrize(
    "how", [Int8Rounding(scale=0.05, zero_point=9), Int8Rounding(row_zero_points=True)], ids=str
)
def test_codes_of_a_file_are_taken_as_they_are(how: Int8Rounding) -> None:
    x = draw(6, 40, dtype=torch.float32)
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(5)[: 24 * 40]
    codes, scales = codes.view(24, 40), draw(24, dtype=torch.float32, seed=1).abs()
    for gate in (None, "silu"):
        for store in stores():
            layer = torch.nn.Module()
            layer.shape = Linear(
                40, {"gate": 12, "up": 12}, build(store, torch.float32), bias=True, gate=gate
            ).shape
            layer.bias = torch.nn.Parameter(draw(24, dtype=torch.float32, seed=2))
            layers = Int8Layers(store)
            layers.attach(layer, codes, scales, how)
            want = reference.linear_int8(x, codes, scales, layer.bias, how)
            if gate is None:
                assert torch.equal(layers.apply(layer, x), want)
            else:
                close(layers.apply_gated(layer, x), reference.silu_and_mul(want))


def test_weights_that_are_not_finite_are_refused() -> None:
    for store in stores():
        layer = Linear(8, 4, build(store, torch.float32))
        layer.targets("")["weight"].fill(torch.tensor(float("inf")).expand(4, 8))
        with pytest.raises(CheckpointError, match=r"\(4, 8\) holds NaN or infinity"):
            layer.finish()


def test_a_layer_of_too_many_inputs_is_refused_before_it_is_loaded() -> None:
    layer = Linear(65537, 1, Build(torch.float32, torch.device("meta"), Int8()))
    with pytest.raises(CheckpointError, match="65537 inputs.*65536"):
        layer.finish()


@pytest.mark.parametrize("name", TINY)
def test_a_family_runs_and_the_plan_counts_its_parameters(name: str, tmp_path: Path) -> None:
    save_tiny(TINY[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = model_config(checkpoint.config, quantization="int8")
    model = load_model(config, device=CPU, checkpoint=checkpoint)
    [plain] = generate(
        load_model(model_config(checkpoint.config), device=CPU, checkpoint=checkpoint),
        [[3, 1, 4, 1, 5]],
        1,
    )
    [run] = generate(model, [[3, 1, 4, 1, 5]], 1)
    assert run.logprobs != plain.logprobs  # rounded
    assert abs(run.logprobs[0] - plain.logprobs[0]) < 0.3
    meta = build_meta_model(config)
    if not any("lm_head" in info for info in checkpoint.infos()):
        assert weight_bytes(meta) == weight_bytes(model)


# ---------------------------------------------------------------- through the engine

PROMPTS = [[5, 9, 2], list(range(3, 60)), [7], [11, 4] * 13, [100, 50, 25, 12, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(TINY["llama-tied"], path)
    return path


def answers(folder: Path, *, together: bool = True, **fields: Any) -> list[Any]:
    """Return what is said to each prompt, given all at once or one after the other."""
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1,
        detokenize=False,
    )  # fmt: skip
    values = {"num_threads": 1, **fields}
    with LLM(
        str(folder), skip_tokenizer_init=True, quantization="int8", max_model_len=96,
        kv_cache_memory_bytes=1 << 20, disable_log_stats=True, **values,
    ) as llm:  # fmt: skip
        return [
            (output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs)
            for prompts in ([PROMPTS] if together else [[prompt] for prompt in PROMPTS])
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]


@needs_extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_are_equal_in_any_batch_and_chunks(folder: Path, dtype: str) -> None:
    alone = answers(folder, together=False, dtype=dtype)
    for fields in ({"num_threads": 2}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}):
        assert answers(folder, dtype=dtype, **fields) == alone


# ---------------------------------------------------------------- memory

_RESIDENT = """
import gc, sys, torch
from pagemill.device.host_memory import give_back_freed
from pagemill.models.loader import load_model
from pagemill.worker.memory import weight_bytes
from tests.models.tiny import model_config

def resident():
    gc.collect()
    give_back_freed()  # else the second model may live in what the first gave back
    words = open("/proc/self/statm").read().split()
    return int(words[1]) * 4096

sizes = dict(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10,
             num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=128,
             tie_word_embeddings=True)
config = {"model_type": "llama", **sizes}
for layers in (1, 10):  # the first for what libraries keep
    settled = model_config({**config, "num_hidden_layers": layers}, load_format="dummy",
                           dtype="bfloat16", quantization="int8")
    before = resident()
    model = load_model(settled, device=torch.device("cpu"), checkpoint=None)
    taken, packed = resident() - before, weight_bytes(model)
    del model
print(taken, packed)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_model_takes_no_more_than_its_packed_size() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    taken, packed = map(int, done.stdout.split())
    assert packed > 180 << 20
    assert packed * 0.95 < taken < packed * 1.15
