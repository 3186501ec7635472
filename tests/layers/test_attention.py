"""The attention layer around `attend`, and the feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagemill.attention.base import AttentionSpec
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.mlp import MLP, GatedMLP, MLPOptions
from pagemill.layers.rope import make_rope
from pagemill.quant.base import RandomWeights
from pagemill.quant.none import Unquantized

CPU = torch.device("cpu")
BUILD = Build(torch.float32, CPU, Unquantized())
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=0.5)


def randomized(layer: torch.nn.Module) -> torch.nn.Module:
    weights = RandomWeights(0, torch.float32, CPU)
    for module in layer.modules():
        if list(module.parameters(recurse=False)):
            module.randomize(weights)
    return layer


def test_attend_gets_the_layers_number_and_heads_of_the_right_shapes() -> None:
    seen = []

    def attend(layer, q, k, v, sinks=None):
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q.contiguous()

    layer = randomized(Attention(7, SPEC, AttentionOptions(hidden_size=10), BUILD))
    assert layer(torch.randn(3, 10), None, attend).shape == (3, 24)
    assert seen == [(7, (3, 4, 6), (3, 2, 6), (3, 2, 6))]


def test_rotation_turns_queries_and_keys_and_not_values() -> None:
    rope = make_rope(None, head_dim=6, max_position=64, max_model_len=64)
    layer = randomized(Attention(0, SPEC, AttentionOptions(hidden_size=10), BUILD))
    x = torch.randn(3, 10)
    seen = {}

    def attend_as(name):
        def attend(layer, q, k, v, sinks=None):
            seen[name] = (q.clone(), k.clone(), v.clone())
            return q.contiguous()

        return attend

    layer(x, None, attend_as("plain"))
    rotation = rope.prepare(torch.tensor([0, 1, 5]), torch.float32)
    layer(x, rotation, attend_as("turned"))
    q, k, v = seen["plain"]
    turned_q, turned_k = rotation.apply(q, k)
    assert torch.equal(seen["turned"][0], turned_q)
    assert torch.equal(seen["turned"][1], turned_k)
    assert torch.equal(seen["turned"][2], v)


def test_gated_mlp_multiplies_the_activated_gate_and_up() -> None:
    layer = randomized(GatedMLP(MLPOptions(8, 12, "silu"), BUILD))
    x = torch.randn(3, 8)
    gate, up = layer.gate_up.weight[:12], layer.gate_up.weight[12:]
    expected = (F.silu(x @ gate.t()) * (x @ up.t())) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)


def test_mlp_activates_between_two_biased_layers() -> None:
    layer = randomized(MLP(MLPOptions(8, 12, "relu", bias=True), BUILD))
    layer.up.bias.fill_(0.3)
    layer.down.bias.fill_(-0.2)
    x = torch.randn(3, 8)
    inner = torch.relu(x @ layer.up.weight.t() + 0.3)
    torch.testing.assert_close(layer(x), inner @ layer.down.weight.t() - 0.2)
