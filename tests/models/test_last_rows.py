"""The end of the last layer: run on the rows that are asked for alone, with the bits of a run on all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagemill import native
from pagemill.attention import BACKENDS
from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.checkpoint import open_checkpoint
from pagemill.models.blocks import DecoderLM
from pagemill.models.loader import load_model
from tests.models.test_loader import _model_type
from tests.models.tiny import TINY, model_config
from tests.quant.changing import CHECKPOINTS

BLOCK_SIZE = 16
# A prompt, the end of another, a token of a third, and the drafts of a fourth.
COUNTS, COMPUTED = (23, 9, 1, 4), (0, 11, 30, 17)
NUM_TOKENS = sum(COUNTS)
QUANTIZED = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())
ROWS = {
    "none": [],
    "one": [22],
    "ends": [22, 31, 32, 33, 34, 35, 36],
    "all": list(range(NUM_TOKENS)),
}


def make(name: str, kernels: str, dtype: str, quantization: str | None = None) -> DecoderLM:
    if kernels == "native" and native.extension() is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    config = model_config(
        {"model_type": _model_type(name), **TINY[name].sizes}, load_format="dummy", dtype=dtype,
        quantization=quantization,
    )  # fmt: skip
    return load_model(config, device=torch.device("cpu"), checkpoint=None, dense=kernels)


def make_quantized(name: str, kernels: str) -> DecoderLM:
    if kernels == "native" and native.extension() is None:
        pytest.skip("pagemill._C is not built: run `make build`")
    checkpoint = open_checkpoint(CHECKPOINTS / name)
    method = checkpoint.config["quantization_config"]["quant_method"]
    config = model_config(checkpoint.config, quantization=method, dtype="bfloat16")
    return load_model(config, device=torch.device("cpu"), checkpoint=checkpoint, dense=kernels)


class Step:
    """A ragged step over caches that hold made-up keys and values of what was computed before."""

    def __init__(self, model: DecoderLM, kernels: str) -> None:
        self.model = model
        self.backend = BACKENDS.load("cpu" if kernels == "native" else "torch")()
        tables = torch.arange(3 * len(COUNTS)).view(len(COUNTS), 3)
        spans = [range(c, c + n) for n, c in zip(COUNTS, COMPUTED, strict=True)]
        starts = [sum(COUNTS[:i]) for i in range(len(COUNTS) + 1)]
        slots = [
            int(tables[i, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for i, span in enumerate(spans)
            for p in span
        ]
        self.batch = AttentionBatch(
            query_starts=tuple(starts), num_computed=COMPUTED, block_tables=tables,
            slot_mapping=torch.tensor(slots), block_size=BLOCK_SIZE,
        )  # fmt: skip
        self.positions = torch.tensor([p for span in spans for p in span])
        generator = torch.Generator().manual_seed(5)
        vocab = model.embedding.shape.out_features
        self.ids = torch.randint(3, vocab, (NUM_TOKENS,), generator=generator)

    def run(self, rows: list[int] | None) -> tuple[Tensor, list[Tensor]]:
        """Return logits of the rows that the pass gives back, and the caches after it."""
        dtype = self.model.build.dtype
        kv = [
            self.backend.allocate_kv(spec, 3 * len(COUNTS), BLOCK_SIZE, dtype, torch.device("cpu"))
            for spec in self.model.attention_specs
        ]
        for seed, pool in enumerate(pool for pair in kv for pool in pair):
            generator = torch.Generator().manual_seed(seed)
            pool.copy_(torch.randn(pool.shape, generator=generator))
        attend = StepAttention(self.backend, self.model.attention_specs, kv, self.batch)
        picked = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        with torch.inference_mode():
            hidden = self.model.forward(self.ids, self.positions, attend, picked)
            return self.model.logits(hidden), [pool for pair in kv for pool in pair]


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("torch", "float32"), ("native", "float32"), ("native", "bfloat16")]
)
@pytest.mark.parametrize("name", TINY)
def test_rows_asked_for_are_those_of_a_step_that_gives_all(name, kernels, dtype) -> None:
    step = Step(make(name, kernels, dtype), kernels)
    expected, caches = step.run(None)
    assert len(expected) == NUM_TOKENS and len(expected.unique(dim=0)) > NUM_TOKENS // 2
    for rows in ROWS.values():
        logits, written = step.run(rows)
        assert logits.shape == expected[rows].shape
        if kernels == "native":
            assert torch.equal(logits, expected[rows])
        else:  # torch's own products are sums in another order for few rows
            torch.testing.assert_close(logits, expected[rows], atol=2e-3, rtol=2e-3)
        assert all(torch.equal(a, b) for a, b in zip(written, caches, strict=True))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_so_are_those_of_quantized_models(quantization) -> None:
    step = Step(make("llama", "native", "bfloat16", quantization), "native")
    expected, _ = step.run(None)
    for rows in ROWS.values():
        assert torch.equal(step.run(rows)[0], expected[rows])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_torch_too_runs_quantized_layers_on_no_rows(quantization) -> None:
    logits, _ = Step(make("llama", "torch", "bfloat16", quantization), "torch").run([])
    assert logits.shape == (0, 151)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_of_quantized_checkpoints_are_too(name, kernels) -> None:
    step = Step(make_quantized(name, kernels), kernels)
    expected, _ = step.run(None)
    for rows in ROWS.values():
        logits, _ = step.run(rows)
        if kernels == "native":
            assert torch.equal(logits, expected[rows])
        assert logits.shape == expected[rows].shape


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("rows", ROWS)
def test_what_follows_the_last_attention_sees_those_rows_alone(name, rows, monkeypatch) -> None:
    model = make(name, "torch", "float32")
    seen: dict[str, list[int]] = {}

    def watch(module, label: str) -> None:
        inner = module.forward

        def forward(x: Tensor, **more: Tensor | None) -> Tensor:
            residual = more.get("residual")
            assert residual is None or len(residual) == len(x)
            seen.setdefault(label, []).append(len(x))
            return inner(x, **more)

        monkeypatch.setattr(module, "forward", forward)

    for layer in model.layers:
        watch(layer.attention.qkv, "qkv")
        watch(layer.attention.out, "out")
        watch(layer.mlp, "mlp")
        watch(layer.mlp_norm, "norm")
    Step(model, "torch").run(ROWS[rows])
    before = [NUM_TOKENS] * (len(model.layers) - 1)
    few = len(ROWS[rows])
    after = [*before, few]
    assert seen == {"qkv": [*before, NUM_TOKENS], "out": after, "mlp": after, "norm": after}
