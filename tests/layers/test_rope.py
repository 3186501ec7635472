"""Every rotary kind against transformers' own modules, in the old and the new spelling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from pagemill.errors import CheckpointError
from pagemill.layers.rope import KINDS, Rope, make_rope, rope_settings

HEAD_DIM, MAX_POSITION, BASE = 32, 256, 5000.0
SHORT = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
LONG = [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with null factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 32,
    },
    "yarn with mscales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope with factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
}


def _llama(settings: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={**settings, "rope_theta": BASE},
    )


def _make(settings: dict[str, Any] | None, max_model_len: int = MAX_POSITION) -> Rope:
    return make_rope(
        settings,
        head_dim=HEAD_DIM,
        max_position=MAX_POSITION,
        max_model_len=max_model_len,
        base=BASE,
    )


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_angles_are_bit_equal_to_transformers(name: str) -> None:
    config = _llama(SETTINGS[name])
    # A whole step of full length, so that kinds that go by length pick what max_model_len picks.
    positions = torch.arange(MAX_POSITION)
    want_cos, want_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    cos, sin = _make(SETTINGS[name]).cos_sin(positions)
    assert torch.equal(torch.cat((cos, cos), -1), want_cos[0])
    assert torch.equal(torch.cat((sin, sin), -1), want_sin[0])


@pytest.mark.parametrize("name", [name for name in sorted(SETTINGS) if name != "default"])
def test_no_kind_is_the_default_in_disguise(name: str) -> None:
    positions = torch.arange(MAX_POSITION)
    length = 4 * MAX_POSITION
    rope, plain = _make(SETTINGS[name], length), _make(None)
    assert not torch.allclose(rope.cos_sin(positions)[0], plain.cos_sin(positions)[0], atol=1e-3)


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - {"default"}))
def test_frequencies_equal_transformers_init_function_at_max_model_len(name: str) -> None:
    config = _llama(SETTINGS[name])
    for length in (48, 64, 65, MAX_POSITION, MAX_POSITION + 1, 1000):
        function = ROPE_INIT_FUNCTIONS[SETTINGS[name]["rope_type"]]
        want, scaling = function(config, torch.device("cpu"), seq_len=length)
        rope = _make(SETTINGS[name], max_model_len=length)
        assert torch.equal(rope.inv_freq, want), length
        assert rope.attention_scaling == scaling


def test_length_dependent_kinds_go_by_max_model_len_and_not_by_the_positions() -> None:
    longrope = SETTINGS["longrope"]
    few, many = torch.tensor([3]), torch.arange(MAX_POSITION)
    for settings in (longrope, SETTINGS["dynamic"]):
        rope = _make(settings, max_model_len=1024)
        assert torch.equal(rope.cos_sin(few)[0][0], rope.cos_sin(many)[0][3])
    plain = _make(None).inv_freq
    assert torch.allclose(_make(longrope, 64).inv_freq * torch.tensor(SHORT), plain)
    assert torch.allclose(_make(longrope, 65).inv_freq * torch.tensor(LONG), plain)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_old_and_new_spelling_give_the_same_rope(name: str) -> None:
    new = {"rope_parameters": {**SETTINGS[name], "rope_theta": BASE}}
    inner = dict(SETTINGS[name])
    with_rope_type = {"rope_scaling": dict(inner), "rope_theta": BASE}
    with_type = {
        "rope_scaling": {"type": inner.pop("rope_type"), **inner},
        "rope_theta": BASE,
    }
    want = make_rope(
        rope_settings(new), head_dim=HEAD_DIM, max_position=MAX_POSITION, max_model_len=MAX_POSITION
    )
    for config in (with_rope_type, with_type):
        got = make_rope(
            rope_settings(config),
            head_dim=HEAD_DIM,
            max_position=MAX_POSITION,
            max_model_len=MAX_POSITION,
        )
        assert torch.equal(got.inv_freq, want.inv_freq)
        assert got.attention_scaling == want.attention_scaling


def test_missing_settings_mean_the_default_kind_with_the_default_base() -> None:
    for config in ({}, {"rope_scaling": None, "rope_parameters": None, "rope_theta": None}):
        settings = rope_settings(config, default_base=77.0)
        rope = make_rope(settings, head_dim=8, max_position=16, max_model_len=16)
        assert torch.allclose(rope.inv_freq, 77.0 ** (-torch.arange(0, 8, 2) / 8))
        assert rope.attention_scaling == 1.0


def test_phi3_forms_agree_with_transformers() -> None:
    scaling = {"type": "su", "short_factor": SHORT[:12], "long_factor": LONG[:12]}
    for kind in ("su", "longrope"):
        hf = {
            "hidden_size": 2 * HEAD_DIM,
            "num_attention_heads": 2,
            "max_position_embeddings": MAX_POSITION,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_theta": BASE,
            "rope_scaling": {**scaling, "type": kind},
        }
        rope = make_rope(
            rope_settings(hf),
            head_dim=HEAD_DIM,
            max_position=MAX_POSITION,
            max_model_len=MAX_POSITION,
        )
        assert rope.rotary_dim == 24
        oracle = dict(hf, rope_scaling={**scaling, "type": "longrope"})
        module = Phi3RotaryEmbedding(Phi3Config(**oracle, pad_token_id=None))
        positions = torch.arange(MAX_POSITION)
        want_cos, want_sin = module(torch.zeros(1), positions[None])
        cos, sin = rope.cos_sin(positions)
        assert torch.equal(torch.cat((cos, cos), -1), want_cos[0])
        assert torch.equal(torch.cat((sin, sin), -1), want_sin[0])
        assert rope.attention_scaling == math.sqrt(1 + math.log(4) / math.log(64))


def test_gpt_neox_names_agree_with_transformers() -> None:
    hf = {"hidden_size": 64, "num_attention_heads": 2, "rotary_pct": 0.5, "rotary_emb_base": 300}
    settings = rope_settings(hf)
    rope = make_rope(settings, head_dim=32, max_position=2048, max_model_len=2048)
    want, _ = GPTNeoXRotaryEmbedding(GPTNeoXConfig(**hf))(torch.zeros(1), torch.arange(50)[None])
    assert torch.equal(rope.cos_sin(torch.arange(50))[0], want[0][:, : want.shape[-1] // 2])


GEMMA_NEW = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GEMMA_OLD = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA_OLD_DEFAULTS = {"rope_scaling": {"type": "linear", "factor": 8.0}}
GEMMA_BOTH = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "default"},
    },
    **GEMMA_OLD,
}


@pytest.mark.parametrize("config", [GEMMA_NEW, GEMMA_OLD, GEMMA_OLD_DEFAULTS, GEMMA_BOTH])
def test_layer_types_have_their_own_rope(config: dict[str, Any]) -> None:
    hf = Gemma3TextConfig(head_dim=32, num_hidden_layers=6, **GEMMA_OLD)
    module = Gemma3RotaryEmbedding(hf)
    positions = torch.arange(300)
    for layer_type in ("full_attention", "sliding_attention"):
        settings = rope_settings(config, layer_type=layer_type, default_base=1e6, local_base=1e4)
        rope = make_rope(settings, head_dim=32, max_position=131072, max_model_len=4096)
        want, _ = module(torch.zeros(1), positions[None], layer_type)
        assert torch.equal(rope.cos_sin(positions)[0], want[0][:, :16])
    full = rope_settings(config, layer_type="full_attention", default_base=1e6, local_base=1e4)
    assert full["rope_theta"] == 1e6
    assert full["factor"] == 8.0


def test_layer_type_without_settings_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'chunked'.*full_attention, sliding_attention"):
        rope_settings(GEMMA_NEW, layer_type="chunked")
    with pytest.raises(CheckpointError, match="type None"):
        rope_settings(GEMMA_NEW)


@pytest.mark.parametrize("field", ["type", "rope_type"])
def test_unknown_kind_lists_the_known_ones(field: str) -> None:
    with pytest.raises(CheckpointError, match=r"'spiral'.*default, dynamic, linear, llama3") as e:
        _make({field: "spiral", "factor": 2.0})
    assert all(kind in str(e.value) for kind in KINDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "linear"}, "factor of kind 'linear' is None"),
        ({"rope_type": "linear", "factor": 0}, "factor of kind 'linear' is 0"),
        ({"rope_type": "dynamic", "factor": "2"}, "factor of kind 'dynamic' is '2'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 values; .* 16"),
        ({"rope_type": "longrope"}, "short_factor has None"),
        ({"partial_rotary_factor": 0.01}, "turns 0 of 32"),
        ({"partial_rotary_factor": 0.1}, "turns 3 of 32"),
        ({"partial_rotary_factor": 1.5}, "turns 48 of 32"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_theta": 10**400}, r"rope_theta .* is 10+; it must be a number over 0 and below"),
        ({"rope_type": 3}, "unknown rotary kind 3"),
    ],
)
def test_impossible_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _make(settings)


def test_settings_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling .* is 'linear'"):
        rope_settings({"rope_scaling": "linear"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_rotation_is_bit_equal_to_transformers(dtype: torch.dtype) -> None:
    config = _llama(SETTINGS["yarn"])
    positions = torch.tensor([0, 5, 5, 200, 17])
    q, k = torch.randn(5, 6, HEAD_DIM).to(dtype), torch.randn(5, 2, HEAD_DIM).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    want_q, want_k = apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=1)
    turn = _make(SETTINGS["yarn"]).prepare(positions, dtype)
    got_q, got_k = turn.apply(q, k)
    assert turn.cos.dtype == dtype
    assert torch.equal(got_q, want_q)
    assert torch.equal(got_k, want_k)
    assert torch.equal(turn.apply_one(torch.cat((q, k), 1)), torch.cat((want_q, want_k), 1))


def test_rope_is_made_of_real_numbers_under_a_default_device_without_data() -> None:
    for settings in SETTINGS.values():
        with torch.device("meta"):
            rope = _make(settings)
        assert torch.equal(rope.inv_freq, _make(settings).inv_freq)
