"""Typed reads of config.json, windows by layer types, and refusal of what is not supported."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.errors import CheckpointError
from pagemill.models import MODELS
from pagemill.models.config_reader import ConfigReader
from tests.models.tiny import TINY

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(model_type: str, **keys: Any) -> list[int | None]:
    """Return the windows that a model type reads, `keys` beside the usual sizes of four layers."""
    sizes = {**TINY["llama-tied"].sizes, "num_hidden_layers": 4, **keys}
    shape = MODELS.load(model_type).read_shape({"model_type": model_type, **sizes})
    return [layer.sliding_window for layer in shape.layers]


def test_a_value_of_another_type_is_an_error_naming_key_value_and_type() -> None:
    reader = ConfigReader({"model_type": "llama", "hidden_size": "64"})
    with pytest.raises(CheckpointError, match=r"llama: hidden_size is '64'; .* type int"):
        reader.read(int, "hidden_size")


def test_a_bool_is_no_number() -> None:
    with pytest.raises(CheckpointError, match="True"):
        ConfigReader({"num_hidden_layers": True}).size("num_hidden_layers")


def test_a_whole_number_may_stand_for_a_float() -> None:
    value = ConfigReader({"rms_norm_eps": 1}).positive("rms_norm_eps")
    assert value == 1.0 and isinstance(value, float)


def test_null_is_absent() -> None:
    reader = ConfigReader({"num_key_value_heads": None, "n_inner": None})
    assert reader.size("num_key_value_heads", default=4) == 4
    assert reader.optional(int, "n_inner") is None


def test_null_switches_off_where_the_family_says_so() -> None:
    assert ConfigReader({"cap": None}).nullable(float, "cap", 30.0) is None
    assert ConfigReader({}).nullable(float, "cap", 30.0) == 30.0
    assert ConfigReader({"cap": 4}).nullable(float, "cap", 30.0) == 4.0


def test_a_missing_required_key_is_named_with_its_other_spellings() -> None:
    with pytest.raises(CheckpointError, match="no hidden_size or n_embd"):
        ConfigReader({"model_type": "gpt2"}).size("hidden_size", "n_embd")


@pytest.mark.parametrize("value", [0, -3])
def test_sizes_are_at_least_one(value) -> None:
    with pytest.raises(CheckpointError, match=f"hidden_size is {value}; it must be at least 1"):
        ConfigReader({"hidden_size": value}).size("hidden_size")


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim"]
)
def test_absurd_sizes_are_refused_before_anything_is_built_by_them(name, key) -> None:
    model_type = name.partition("-")[0]
    keys = {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
    }
    if model_type == "gpt2":
        key = keys.get(key, key)
    config = {**TINY[name].sizes, "model_type": model_type, key: 10**12}
    config.pop("num_key_value_heads", None)
    with pytest.raises(CheckpointError, match=rf"{key} is 1000000000000; it must be at most"):
        MODELS.load(model_type).read_shape(config)


def test_heads_and_their_size_are_bounded_together() -> None:
    reader = ConfigReader({"num_attention_heads": 2**20, "hidden_size": 64, "head_dim": 2**20})
    with pytest.raises(CheckpointError, match=r"head_dim is 1048576; with 1048576 query heads"):
        reader.heads()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_positive_numbers_are_finite_and_over_zero(value) -> None:
    with pytest.raises(CheckpointError, match="over 0"):
        ConfigReader({"rms_norm_eps": value}).positive("rms_norm_eps")


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_act is 'mish'; known: gelu"):
        ConfigReader({"hidden_act": "mish"}).activation("hidden_act", default="silu")


def test_key_value_heads_must_divide_the_query_heads() -> None:
    reader = ConfigReader({"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 3})
    with pytest.raises(CheckpointError, match="num_key_value_heads is 3"):
        reader.heads()


def test_heads_must_divide_the_hidden_size_unless_head_dim_is_given() -> None:
    sizes = {"hidden_size": 50, "num_attention_heads": 4}
    with pytest.raises(CheckpointError, match="hidden size 50"):
        ConfigReader(sizes).heads()
    assert ConfigReader({**sizes, "head_dim": 16}).heads() == (4, 4, 16)


# ---------------------------------------------------------------- windows


def test_mistral_has_its_window_in_every_layer() -> None:
    assert windows("mistral", sliding_window=8) == [8] * 4


def test_mistral_without_the_key_has_the_published_window_and_with_null_none() -> None:
    assert windows("mistral") == [4096] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "qwen2", "qwen3", "gemma2"])
def test_layer_types_win_over_a_window(model_type) -> None:
    keys = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    assert windows(model_type, **keys, layer_types=[FULL] * 4) == [None] * 4
    mixed = [FULL, SLIDING, FULL, SLIDING]
    assert windows(model_type, **keys, layer_types=mixed) == [None, 8, None, 8]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows_are_off_unless_switched_on(model_type) -> None:
    assert windows(model_type, sliding_window=8, max_window_layers=1) == [None] * 4
    keys = {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}
    assert windows(model_type, **keys) == [None, 8, 8, 8]


def test_gemma2_alternates() -> None:
    assert windows("gemma2", sliding_window=8) == [8, None, 8, None]


def test_gemma3_has_five_windows_to_a_full_layer() -> None:
    found = windows("gemma3_text", sliding_window=8, num_hidden_layers=13)
    assert [index for index, window in enumerate(found) if window is None] == [5, 11]
    found = windows("gemma3_text", sliding_window=8, sliding_window_pattern=2)
    assert found == [8, None, 8, None]


def test_phi3_has_a_window_only_where_one_is_written() -> None:
    assert windows("phi3") == [None] * 4
    assert windows("phi3", sliding_window=8) == [8] * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": [FULL]}, "4 layers"),
        ({"layer_types": "full_attention"}, "4 layers"),
        ({"layer_types": [FULL, "linear_attention", FULL, FULL]}, "'linear_attention'"),
        ({"layer_types": [SLIDING] * 4, "sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window": "8"}, "sliding_window is '8'"),
    ],
)
def test_windows_that_make_no_sense_are_refused(keys, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        windows("mistral", **keys)


# ---------------------------------------------------------------- what families do not support


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "causal"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gpt_neox", {}, "num_key_value_heads is 2"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("gemma3", {"text_config": 3}, "text_config"),
    ],
)
def test_unsupported_settings_are_refused_by_name(model_type, keys, message) -> None:
    config = {**TINY["llama-tied"].sizes, **keys}
    with pytest.raises(CheckpointError, match=message):
        MODELS.load(model_type).read_shape({"model_type": model_type, **config})


def test_the_shape_counts_the_bytes_of_a_token() -> None:
    shape = MODELS.load("llama").read_shape({"model_type": "llama", **TINY["llama"].sizes})
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (3, 48, 151)
    assert shape.kv_bytes_per_token("bfloat16") == 3 * 2 * 2 * 10 * 2


def test_a_gemma3_with_pictures_takes_sizes_from_its_text_config() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6, "hidden_size": 64}}
    shape = MODELS.load("gemma3").read_shape({**config, "vocab_size": 3})
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (6, 64, 262_208)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma2", "gemma3"])
def test_scaling_stretches_no_learned_positions_and_no_gemma(name) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = {**TINY[name].sizes, "model_type": name, "rope_scaling": scaling}
    assert MODELS.load(name).context_lengths(config) == (128, 128)


def test_phi_3_calls_longrope_yarn_and_it_stretches_nothing() -> None:
    scaling = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    config = {**TINY["phi3"].sizes, "model_type": "phi3", "rope_scaling": scaling}
    assert MODELS.load("phi3").context_lengths(config) == (128, 128)
