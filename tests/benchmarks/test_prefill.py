"""A prefill step by part: which part a call belongs to, what it computes, and that nothing is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.prefill import Calls, Peaks, Shape, Step, Stopwatch, report
from benchmarks.random_models import SHAPES, sizes

QWEN = Shape.of(SHAPES["qwen3-0.6b"])


def calls_of_a_step(shape: Shape) -> Calls:
    """Return one step's calls, each of a hundredth of a second."""
    calls = Calls(shape)
    for _ in range(shape.layers):
        for function in ("rms_norm", "linear", "rotate_heads", "attention", "linear"):
            calls.note(function, 0.01)
        for function in ("rms_norm", "linear", "linear"):
            calls.note(function, 0.01)
    for function in ("rms_norm", "linear", "best_rows"):
        calls.note(function, 0.01)
    return calls


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_matrices_have_the_operations_of_their_model(name: str, tmp_path: Path) -> None:
    config = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.of(config)
    one, three = (
        sum(shape.linear_flops(matrix, rows) for matrix in shape.matrices) for rows in (1, 3)
    )
    assert three - one == 2 * sizes(tmp_path).linear_flops_per_token
    # The last token goes all the way, through all weights but the head's.
    head = 2 * config["hidden_size"] * config["vocab_size"]
    assert one == sizes(tmp_path).weight_bytes - head


def test_linear_calls_belong_to_the_matrices_in_turn_and_the_last_to_the_head() -> None:
    calls = calls_of_a_step(QWEN)
    assert {name: calls.counts[name] for name in QWEN.matrices} == dict.fromkeys(QWEN.matrices, 28)
    assert calls.counts["head"] == 1 and calls.counts["attention"] == 28


def test_parts_add_up_to_the_whole_step() -> None:
    step = Step(
        whole_s=4.0, model_s=3.5, calls=calls_of_a_step(QWEN), num_faults=7, processor_s=6.0
    )
    parts = step.parts()
    assert sum(parts.values()) == pytest.approx(step.whole_s)
    assert parts["around the model"] == pytest.approx(4.0 - 3.5 - 0.01)
    table = report(QWEN, 128, [step], [Peaks(460e9, 460e9)])
    assert "| attention | 28 | 280.00 |" in table and "7 pages touched" in table
    assert "1.50 cores busy" in table


def test_operations_are_timed_and_return_what_they_did() -> None:
    module = ModuleType("operations")
    for name in ("linear", "linear_int8", "qlinear", "attention", "best_rows", "rms_norm"):
        setattr(module, name, lambda *args: sum(args))
    watch = Stopwatch(QWEN, module)
    assert module.linear(1, 2) == 3 and module.attention(4) == 4
    assert watch.calls.counts == {"qkv": 1, "attention": 1}
    watch.start()
    assert watch.calls.counts == {}
