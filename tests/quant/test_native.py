"""The packed form of weights that are not quantized: the plain form's results, in one copy."""

from __future__ import annotations

import contextlib
import math
import mmap
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagemill import native
from pagemill.checkpoint import open_checkpoint
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.linear import GatedLinear, Linear, QKVLinear
from pagemill.models.loader import build_meta_model, load_model
from pagemill.quant import DENSE_METHODS, waiting
from pagemill.quant.base import RandomWeights
from pagemill.quant.waiting import WaitingRows
from pagemill.worker.memory import weight_bytes
from tests.models.driver import generate
from tests.models.tiny import TINY, model_config, save_tiny
from tests.ops.conftest import needs_extension

if native.extension() is not None:
    from pagemill.ops import cpu as native_ops

pytestmark = needs_extension
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def build(dense: str, dtype: torch.dtype) -> Build:
    return Build(dtype, CPU, DENSE_METHODS.load(dense)())


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_gives_the_plain_forms_result_and_takes_its_residual(dtype: torch.dtype) -> None:
    x = draw(5, 33, dtype=dtype)
    results = {}
    for dense in ("torch", "native"):
        layer = QKVLinear(33, (4, 2, 7), build(dense, dtype), bias=True)
        for i, part in enumerate("qkv"):
            for j, target in enumerate(layer.targets(part).values()):
                target.fill(draw(*target.shape, dtype=dtype, seed=2 * i + j))
        layer.finish()
        stream = draw(5, 56, dtype=dtype, seed=9)
        results[dense] = layer.forward(x)
        assert layer.forward(x, residual=stream) is stream
        close(stream, results[dense] + draw(5, 56, dtype=dtype, seed=9))
    close(results["native"], results["torch"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu2"])
def test_a_gate_is_applied_whether_the_kernel_knows_it_or_not(
    activation: str, dtype: torch.dtype
) -> None:
    x, results = draw(5, 33, dtype=dtype), {}
    for dense in ("torch", "native"):
        layer = GatedLinear(33, 21, activation, build(dense, dtype), bias=True)
        for i, part in enumerate(("gate", "up")):
            for target in layer.targets(part).values():
                target.fill(draw(*target.shape, dtype=dtype, seed=i) / 6)
        layer.finish()
        results[dense] = layer.forward(x)
    assert results["native"].shape == (5, 21)
    close(results["native"], results["torch"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_float32_sums_and_a_tied_embedding_keeps_its_rows(
    dtype: torch.dtype, tied: bool
) -> None:
    made = build("native", dtype)
    embedding = TokenEmbedding(37, 30, made)
    head = Head(embedding, made, tied=tied)
    weights = draw(37, 30, dtype=dtype)
    embedding.targets("")["weight"].fill(weights)
    if not tied:
        head.targets("")["weight"].fill(weights)
    head.finish()
    ids = torch.tensor([36, 0, 5])
    assert torch.equal(embedding.forward(ids), weights[ids])
    x = draw(4, 30, dtype=dtype, seed=1)
    logits = head.forward(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weights.float().t(), atol=1e-4, rtol=1e-5)
    copies = sum(p.numel() for p in [*embedding.parameters(), *head.parameters()])
    padded = 48 * 32  # tiles of 16 rows and of 16 or 32 columns
    assert copies == (padded if tied else padded + 37 * 30)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 1, 8), (4, 2, 7), (3, 1, 16)])
def test_rows_that_wait_are_packed_like_rows_that_are_written(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    stored: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_SLICE_ELEMENTS", 33 * 16)  # tiles are cast one at a time
    layers = []
    for waits in (True, False):
        layer = QKVLinear(33, heads, build("native", dtype), bias=False)
        for i, part in enumerate("vqk"):
            target = layer.targets(part)["weight"]
            assert isinstance(target, WaitingRows)
            rows = draw(*target.shape, dtype=stored, seed=i)
            (target if waits else target.written()).fill(rows)
        layer.finish()
        layers.append(layer)
    assert torch.equal(layers[0].packed, layers[1].packed)


def test_rows_that_wait_are_never_written_to_the_matrix() -> None:
    layer = GatedLinear(64, 48, "silu", build("native", torch.bfloat16), bias=False)
    matrix = layer.weight
    for part in ("gate", "up"):
        layer.targets(part)["weight"].fill(torch.ones(48, 64, dtype=torch.bfloat16))
    layer.finish()
    assert not matrix.any() and bool(layer.packed.all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_touching_tiles_writes_to_every_page_and_leaves_zeros(threads: int) -> None:
    module = native.required()
    before = module.num_threads()
    shape = native_ops.packed_shape(700, 300, torch.float32)
    pages = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without large pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    packed = torch.frombuffer(pages, dtype=torch.float32).view(shape)
    module.set_num_threads(threads)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    native_ops.touch_tiles(packed)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    module.set_num_threads(before)
    assert faults >= len(pages) // mmap.PAGESIZE
    assert not packed.any()


def test_a_packed_layer_keeps_no_plain_rows() -> None:
    layer = Linear(64, 32, build("native", torch.float32))
    layer.randomize(RandomWeights(0, torch.float32, CPU))
    layer.finish()
    assert [name for name, _ in layer.named_parameters()] == ["packed"]


@pytest.mark.parametrize("name", TINY)
def test_a_family_makes_the_plain_forms_tokens(name: str, tmp_path: Path) -> None:
    save_tiny(TINY[name], tmp_path)
    runs, models = [], []
    for dense in ("torch", "native"):
        checkpoint = open_checkpoint(tmp_path)
        config = model_config(checkpoint.config)
        models.append(load_model(config, device=CPU, checkpoint=checkpoint, dense=dense))
        runs.append(generate(models[-1], [[3, 1, 4, 1, 5], [9, 2]], 6))
    for plain, packed in zip(*runs, strict=True):
        assert packed.new_ids == plain.new_ids
        assert packed.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    # The plan counts what is resident.
    meta = build_meta_model(config, dense="native")
    if not any("lm_head" in info for info in checkpoint.infos()):
        assert weight_bytes(meta) == weight_bytes(models[1])
