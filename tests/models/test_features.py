"""Every feature of every family matters in the tiny models: switched off, the tokens change.

Without this, the comparison with transformers could pass although a feature is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from pagemill.layers.rope import make_rope
from pagemill.models.blocks import DecoderLM, ParallelLayer, PreNormLayer
from tests.models.conftest import load
from tests.models.driver import generate
from tests.models.test_families import NUM_TOKENS, PROMPTS

Change = Callable[[DecoderLM], None]


def spec(**changes) -> Change:
    """Change the attention of every layer."""

    def change(model: DecoderLM) -> None:
        for layer in model.layers:
            layer.attention.spec = dataclasses.replace(layer.attention.spec, **changes)

    return change


def no_bias(path: str) -> Change:
    """Zero a bias in every layer."""

    def change(model: DecoderLM) -> None:
        for layer in model.layers:
            layer.get_submodule(path).bias.zero_()

    return change


def gate(activation: str) -> Change:
    """Use another activation in every gated layer."""

    def change(model: DecoderLM) -> None:
        for layer in model.layers:
            linear = layer.mlp.gate_up
            linear.shape = dataclasses.replace(linear.shape, gate=activation)

    return change


def rope(index: int = 0, **settings) -> Change:
    """Use another rope."""

    def change(model: DecoderLM) -> None:
        head_dim = model.attention_specs[0].head_dim
        ropes = list(model.ropes)
        ropes[index] = make_rope(settings, head_dim=head_dim, max_position=128, max_model_len=128)
        model.ropes = tuple(ropes)

    return change


def each_layer(**attributes) -> Change:
    """Set attributes of every layer; a function makes the value from the layer."""

    def change(model: DecoderLM) -> None:
        for layer in model.layers:
            for path, value in attributes.items():
                *owners, name = path.split("__")
                setattr(layer.get_submodule(".".join(owners)), name, value)

    return change


def whole(**attributes) -> Change:
    """Set attributes of the model; "a__b" is attribute b of its part a."""

    def change(model: DecoderLM) -> None:
        for path, value in attributes.items():
            *owners, name = path.split("__")
            setattr(model.get_submodule(".".join(owners)), name, value)

    return change


def rebuild(layer_class) -> Change:
    """Put the parts of each layer together in another way."""

    def change(model: DecoderLM) -> None:
        model.layers = torch.nn.ModuleList(
            layer_class(layer.attention, layer.mlp, (layer.attention_norm, layer.mlp_norm))
            for layer in model.layers
        )

    return change


def plain_norm_weights(model: DecoderLM) -> None:
    for module in model.modules():
        if getattr(module, "offset", None) == 1.0:
            module.offset = 0.0


def window_in_every_layer(model: DecoderLM) -> None:
    spec(sliding_window=8)(model)


FEATURES: dict[str, tuple[str, Change]] = {
    "llama rope scaling": ("llama", rope(rope_theta=100.0)),
    "llama rope base": ("llama-tied", rope(rope_theta=100.0)),
    "llama qkv bias": ("llama", no_bias("attention.qkv")),
    "llama output bias": ("llama", no_bias("attention.out")),
    "llama gate and up bias": ("llama", no_bias("mlp.gate_up")),
    "llama down bias": ("llama", no_bias("mlp.down")),
    "mistral window": ("mistral", spec(sliding_window=None)),
    "mistral window one less": ("mistral", spec(sliding_window=7)),
    "mistral window one more": ("mistral", spec(sliding_window=9)),
    "qwen2 bias": ("qwen2", no_bias("attention.qkv")),
    "qwen2 yarn": ("qwen2", rope(rope_theta=100.0)),
    "qwen2 window": ("qwen2", spec(sliding_window=None)),
    "qwen2 first layers without window": ("qwen2", window_in_every_layer),
    "qwen3 q and k norm": ("qwen3", each_layer(attention__qk_norm=None)),
    "qwen3 bias": ("qwen3", no_bias("attention.qkv")),
    "gemma2 attention cap": ("gemma2", spec(logit_softcap=None)),
    "gemma2 window": ("gemma2", spec(sliding_window=None)),
    "gemma2 alternation": ("gemma2", window_in_every_layer),
    "gemma2 scale": ("gemma2", spec(scale=14**-0.5)),
    "gemma2 norm offset": ("gemma2", plain_norm_weights),
    "gemma2 norm after attention": ("gemma2", each_layer(attention_out_norm=None)),
    "gemma2 norm after mlp": ("gemma2", each_layer(mlp_out_norm=None)),
    "gemma2 embedding scale": ("gemma2", whole(embedding__scale=None)),
    "gemma2 activation": ("gemma2", gate("silu")),
    "gemma3 window": ("gemma3", spec(sliding_window=None)),
    "gemma3 full layer": ("gemma3", window_in_every_layer),
    "gemma3 q and k norm": ("gemma3", each_layer(attention__qk_norm=None)),
    "gemma3 norm offset": ("gemma3", plain_norm_weights),
    "gemma3 global rope scaling": ("gemma3", rope(rope_theta=5000.0)),
    "gemma3 local rope base": ("gemma3", rope(1, rope_theta=5000.0)),
    "gemma3 one rope for all": ("gemma3", whole(layer_ropes=(0, 0, 0, 0))),
    "gemma3 embedding scale": ("gemma3", whole(embedding__scale=None)),
    "phi3 window": ("phi3", spec(sliding_window=None)),
    "phi3 longrope": ("phi3", rope(rope_theta=1000.0, partial_rotary_factor=0.75)),
    "phi3 partial rotary": ("phi3", rope(rope_theta=1000.0)),
    "gpt2 positions": ("gpt2", whole(positions=None)),
    "gpt2 scale by layer": ("gpt2", spec(scale=9**-0.5)),
    "gpt2 qkv bias": ("gpt2", no_bias("attention.qkv")),
    "gpt2 mlp bias": ("gpt2", no_bias("mlp.up")),
    "gpt2 activation": ("gpt2", each_layer(mlp__activation="relu")),
    "opt position offset": ("opt", whole(positions__offset=0)),
    "opt bias": ("opt", no_bias("attention.out")),
    "opt activation": ("opt", each_layer(mlp__activation="gelu")),
    "opt norm order": ("opt-post-norm", rebuild(PreNormLayer)),
    "opt no last norm": ("opt", whole(norm=None)),
    "gpt_neox parallel residual": ("gpt_neox", rebuild(PreNormLayer)),
    "gpt_neox sequential residual": ("gpt_neox-sequential", rebuild(ParallelLayer)),
    "gpt_neox partial rotary": ("gpt_neox", rope(rope_theta=100.0)),
    "gpt_neox default share": ("gpt_neox-sequential", rope(partial_rotary_factor=0.5)),
    "gpt_neox bias": ("gpt_neox", no_bias("attention.qkv")),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_switching_a_feature_off_changes_the_tokens(feature, tiny_pair) -> None:
    name, change = FEATURES[feature]
    folder, _ = tiny_pair(name)
    model, changed = load(folder), load(folder)
    change(changed)
    assert _tokens(model) != _tokens(changed)


def test_the_cap_of_the_logits_changes_the_logprobs(tiny_pair) -> None:
    """A cap keeps the order of logits, so greedy tokens cannot show it."""
    folder, _ = tiny_pair("gemma2")
    model, changed = load(folder), load(folder)
    changed.head.softcap = None
    [run], [other] = generate(model, PROMPTS[-1:], 4), generate(changed, PROMPTS[-1:], 4)
    assert run.new_ids == other.new_ids
    assert abs(run.logprobs[0] - other.logprobs[0]) > 1e-3


def _tokens(model: DecoderLM) -> list[list[int]]:
    return [run.new_ids for run in generate(model, PROMPTS, NUM_TOKENS)]
