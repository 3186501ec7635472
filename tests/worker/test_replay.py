"""A recorded step gives the plain step's bits, and a model that cannot be recorded runs plainly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemill import native
from pagemill.attention.base import AttentionBatch, StepAttention
from pagemill.attention.cpu import CPUAttention
from pagemill.checkpoint import open_checkpoint
from pagemill.models.loader import load_model
from pagemill.worker import replay
from pagemill.worker.forward import PlainForward
from pagemill.worker.replay import MAX_LOGIT_ROWS, MAX_TOKENS, ReplayedForward
from tests.fakes.fake_model import save_tiny_llama
from tests.models.test_loader import _model_type
from tests.models.tiny import TINY, model_config
from tests.ops.conftest import needs_extension
from tests.quant.changing import CHECKPOINTS

pytestmark = needs_extension
BLOCK_SIZE, NUM_BLOCKS = 16, 64


class Steps:
    """One model, and the same steps through its own forward and through recordings."""

    def __init__(self, name: str, dtype: str, quantization: str | None = None) -> None:
        """Take a tiny model of a family, or a quantized checkpoint of this folder."""
        checkpoint = None
        if name in TINY:
            config = model_config(
                {"model_type": _model_type(name), **TINY[name].sizes},
                load_format="dummy", dtype=dtype, quantization=quantization,
            )  # fmt: skip
        else:
            checkpoint = open_checkpoint(CHECKPOINTS / name)
            method = checkpoint.config["quantization_config"]["quant_method"]
            config = model_config(checkpoint.config, quantization=method, dtype=dtype)
        self.model = load_model(
            config, device=torch.device("cpu"), checkpoint=checkpoint, dense="native"
        )
        self.vocab = config.shape.vocab_size
        self.backend = CPUAttention()
        self.replayed = ReplayedForward(self.model, self.backend)
        self.caches = [
            [
                self.backend.allocate_kv(
                    spec, NUM_BLOCKS, BLOCK_SIZE, getattr(torch, dtype), torch.device("cpu")
                )
                for spec in self.model.attention_specs
            ]
            for _ in range(2)
        ]

    def run(
        self, counts: list[int], computed: list[int], seed: int, rows: list[int] | None = None
    ) -> list[list[Tensor]]:
        """Return hidden states, of all tokens or of `rows`, and logits of all, of both forwards.

        The step is over sequences of four blocks each.
        """
        picked = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocab, (sum(counts),), generator=generator)
        tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
        tables = tables[: 4 * len(counts)].view(len(counts), 4)
        positions, slots, starts = [], [], [0]
        for i, (count, done) in enumerate(zip(counts, computed, strict=True)):
            here = torch.arange(done, done + count)
            positions.append(here)
            slots.append(tables[i, here // BLOCK_SIZE] * BLOCK_SIZE + here % BLOCK_SIZE)
            starts.append(starts[-1] + count)
        batch = AttentionBatch(
            query_starts=tuple(starts), num_computed=tuple(computed), block_tables=tables,
            slot_mapping=torch.cat(slots), block_size=BLOCK_SIZE,
        )  # fmt: skip
        results = []
        for forward, kv in zip((PlainForward(self.model), self.replayed), self.caches, strict=True):
            attend = StepAttention(self.backend, self.model.attention_specs, kv, batch)
            places = torch.cat(positions)
            hidden = forward.hidden(ids, places, attend, picked).clone()
            results.append([hidden, forward.logits(ids, places, attend).clone()])
        return results


def same(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(plain, replayed) for plain, replayed in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*TINY, "gptq-4-act-order-g32", "gptq-8-act-order-row"])
def test_a_replayed_step_has_the_plain_steps_bits(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 1)
    steps = Steps(name, dtype)
    assert same(steps.run([7, 9], [0, 0], seed=0))  # 16 tokens, plain
    assert same(steps.run([5, 11], [7, 9], seed=1))  # recorded and checked
    assert same(steps.run([16], [3], seed=2))  # replayed, over other sequences
    for i in range(5):
        assert same(steps.run([1, 1], [12 + i, 20 + i], seed=3 + i))
    assert steps.replayed.recorded_counts == ((2, 16), (2, 16))
    assert all(
        torch.equal(ours, theirs)
        for pairs in zip(*steps.caches, strict=True)
        for ours, theirs in zip(*pairs, strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models_are_replayed_with_and_without_a_head_of_their_own(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps(name, "bfloat16", quantization)
    assert same(steps.run([7, 9], [0, 0], seed=0))
    assert same(steps.run([5, 11], [7, 9], seed=1))
    assert steps.replayed.recorded_counts == ((16,), (16,))


def test_rows_are_picked_from_a_replayed_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 1)
    steps = Steps("llama", "bfloat16")
    for i, rows in enumerate(([4, 6], [0], [], [6, 2], None)):
        results = steps.run([5, 2], [7 * i, 7 * i], seed=i, rows=rows)
        assert same(results)
        assert len(results[1][0]) == (7 if rows is None else len(rows))
    assert steps.replayed.recorded_counts == ((7,), (7,))
    assert same(steps.run([33, MAX_TOKENS - 32], [0, 0], seed=1, rows=[32, MAX_TOKENS]))


def test_steps_of_many_tokens_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps("llama", "float32")
    for _ in range(2):
        assert same(steps.run([33, MAX_TOKENS - 32], [0, 0], seed=1))
    assert steps.replayed.recorded_counts == ((), ())


def test_steps_of_many_rows_of_logits_replay_the_layers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps("llama", "float32")
    for i in range(3):
        assert same(steps.run([MAX_LOGIT_ROWS + 1], [i], seed=i))
        assert same(steps.run([MAX_LOGIT_ROWS], [i], seed=i))
    assert steps.replayed.recorded_counts == (
        (MAX_LOGIT_ROWS, MAX_LOGIT_ROWS + 1),
        (MAX_LOGIT_ROWS,),
    )


def test_a_head_that_cannot_be_recorded_runs_after_replayed_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps("llama", "float32")
    head = steps.model.head.forward
    monkeypatch.setattr(steps.model.head, "forward", lambda hidden: head(hidden) + 1.0)
    for i in range(3):
        assert same(steps.run([3], [3 * i], seed=i))
    assert steps.replayed.recorded_counts == ((3,), ())


def test_a_step_is_recorded_only_after_some_of_its_size() -> None:
    steps = Steps("llama", "float32")
    for i in range(replay._SEEN_FIRST):
        assert same(steps.run([1], [i], seed=i))
    assert steps.replayed.recorded_counts == ((), ())
    assert same(steps.run([1], [replay._SEEN_FIRST], seed=9))
    assert steps.replayed.recorded_counts == ((1,), (1,))


@pytest.fixture
def two_threads() -> Iterator[None]:
    module = native.required()
    before = module.num_threads()
    module.set_num_threads(2)
    yield
    module.set_num_threads(before)


def test_scratch_memory_grows_under_a_recording(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps("llama", "bfloat16")
    assert same(steps.run([2], [0], seed=1))
    assert steps.replayed.recorded_counts == ((2,), (2,))
    before = steps.backend.scratch
    for done in range(2, 60, 2):
        steps.backend.scratch = torch.empty(0, dtype=torch.uint8)
        assert same(steps.run([2], [done], seed=done))
    assert steps.backend.scratch.numel() >= before.numel()


class Meddler(torch.nn.Module):
    """A layer that does something a recording would leave out."""

    def __init__(self, inner: Any, meddle: Any) -> None:
        super().__init__()
        self.inner, self.meddle, self.attention = inner, meddle, inner.attention

    def forward(self, x: Tensor, rotation: Any, attend: Any, rows: Any = None) -> Tensor:
        return self.meddle(self.inner.forward(x, rotation, attend, rows))


def unrecorded(x: Tensor) -> Tensor:
    """Change memory behind torch's back."""
    x.numpy()[...] *= 2.0
    return x


@pytest.mark.parametrize("meddle", [lambda x: x + 1.0, lambda x: x.mul_(2.0), unrecorded])
def test_work_between_native_calls_is_noticed(meddle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SEEN_FIRST", 0)
    steps = Steps("llama", "float32")
    layers = steps.model.layers
    layers[0] = Meddler(layers[0], meddle)
    for i in range(3):
        assert same(steps.run([3], [3 * i], seed=i))
    assert steps.replayed.recorded_counts == ((), ())


def test_an_engine_replays_unless_told_not_to(tmp_path: Path) -> None:
    from pagemill.llm import LLM
    from pagemill.sampling_params import SamplingParams

    folder = save_tiny_llama(tmp_path)
    said, counts = [], []
    for eager in (True, False):
        with LLM(
            str(folder), max_model_len=96, kv_cache_memory_bytes=1 << 20, enforce_eager=eager
        ) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
            output = llm.generate("The capital", params, use_tqdm=False)[0].outputs[0]
            said.append((output.token_ids, output.logprobs))
            forward = llm.llm_engine._executor._worker._runner._forward
            counts.append(getattr(forward, "recorded_counts", None))
    assert said[0] == said[1]
    assert counts == [None, ((), (1,))]


_IMPORTS = """
import sys
from pagemill import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
with LLM(sys.argv[1], max_model_len=96, kv_cache_memory_bytes=1 << 20) as llm:
    llm.generate("The capital", SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    known = set(sys.modules)
    llm.generate("The capital", params, use_tqdm=False)
    assert llm.llm_engine._executor._worker._runner._forward.recorded_counts == ((), (1,))
print(sorted(set(sys.modules) - known))
"""


def test_no_step_waits_for_an_import(tmp_path: Path) -> None:
    """Torch's compiler, which some of torch imports when first called, takes more than a second."""
    folder = save_tiny_llama(tmp_path)
    said = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(folder)], check=True, capture_output=True, text=True
    )
    assert said.stdout == "[]\n"
