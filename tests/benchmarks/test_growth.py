"""The bounds of growth: what a shape's parts ask for, and how they add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.growth import MODELS, Limits, Model, make_point
from benchmarks.random_models import sizes

LIMITS = Limits(stream_bytes_per_s=20e9, pieces_bytes_per_s=10e9, flops_per_s=400e9)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_shape_has_the_weights_and_cache_of_its_model(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = sizes(tmp_path)
    model = Model(config, config["num_hidden_layers"])
    assert 2 * model.weights == known.weight_bytes
    assert model.kv_bytes == known.kv_bytes_per_token


def test_weights_cost_the_same_for_any_sequences_and_the_rest_grows_with_them() -> None:
    model = Model(MODELS["qwen3-0.6b"], 4)
    one, many = (make_point(model, LIMITS, n, 128, 50.0) for n in (1, 64))
    assert many.weights_ms == one.weights_ms
    for name in ("kv_ms", "linear_ms", "attention_ms"):
        assert getattr(many, name) == pytest.approx(64 * getattr(one, name))


def test_keys_are_read_at_the_speed_of_pieces() -> None:
    model = Model(MODELS["qwen3-0.6b"], 1)
    point = make_point(model, LIMITS, 1, 1000, 50.0)
    assert point.kv_ms == pytest.approx(1e3 * 4096 * 1000 / 10e9)


def test_the_least_overlaps_reading_and_computing_inside_each_part_only() -> None:
    point = make_point(Model(MODELS["qwen3-0.6b"], 28), LIMITS, 64, 2048, 50.0)
    assert point.linear_ms > point.weights_ms
    assert point.kv_ms > point.attention_ms
    assert point.least_ms == point.linear_ms + point.kv_ms
    assert point.sum_ms == point.least_ms + point.weights_ms + point.attention_ms
