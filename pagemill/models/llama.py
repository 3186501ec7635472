"""Llama 2 and 3, SmolLM2 and the many models of their shape. Touvron et al. 2023.

`llama_parts` also builds the families that differ from Llama in a switch or two (Mistral, Qwen2,
Qwen3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagemill.attention.base import AttentionSpec
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.mlp import GatedMLP, MLPOptions
from pagemill.layers.norm import RMSNorm
from pagemill.models.blocks import DecoderLM, Parts, PreNormLayer, read_rope
from pagemill.models.config_reader import ConfigReader, make_shape
from pagemill.models.weight_map import WeightMap

LLAMA_MODULES = {
    "embed_tokens": "embedding",
    "layers.{}.input_layernorm": "layers.{}.attention_norm",
    "layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
    "layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
    "layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
    "layers.{}.self_attn.o_proj": "layers.{}.attention.out",
    "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "layers.{}.mlp.gate_proj": "layers.{}.mlp.gate_up:gate",
    "layers.{}.mlp.up_proj": "layers.{}.mlp.gate_up:up",
    "layers.{}.mlp.down_proj": "layers.{}.mlp.down",
    "norm": "norm",
    "lm_head": "head",
}
QK_NORM_MODULES = {
    "layers.{}.self_attn.q_norm": "layers.{}.attention.qk_norm:q",
    "layers.{}.self_attn.k_norm": "layers.{}.attention.qk_norm:k",
}
# Tables that older files carry and that are computed here.
ROTARY_TABLES = r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"


@dataclass(frozen=True, slots=True)
class LlamaSwitches:
    """What families of Llama's shape differ in."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def llama_parts(
    reader: ConfigReader, shape: ModelShape, config: ModelConfig, build: Build, tied: bool,
    switches: LlamaSwitches,
) -> Parts:  # fmt: skip
    """Build a decoder of Llama's shape."""
    hidden, eps = shape.hidden_size, reader.positive("rms_norm_eps", default=1e-6)
    mlp = MLPOptions(
        hidden, shape.intermediate_size, reader.activation("hidden_act", default="silu"),
        switches.mlp_bias,
    )  # fmt: skip
    options = AttentionOptions(
        hidden_size=hidden,
        qkv_bias=switches.qkv_bias,
        out_bias=switches.out_bias,
        qk_norm_eps=eps if switches.qk_norm else None,
    )
    layers = []
    for index, layer in enumerate(shape.layers):
        spec = AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.head_dim**-0.5,
            sliding_window=layer.sliding_window,
        )
        norms = (RMSNorm(hidden, eps, build), RMSNorm(hidden, eps, build))
        layers.append(
            PreNormLayer(Attention(index, spec, options, build), GatedMLP(mlp, build), norms)
        )
    embedding = TokenEmbedding(shape.vocab_size, hidden, build)
    return Parts(
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(hidden, eps, build),
        head=Head(embedding, build, tied=tied),
        ropes=(read_rope(reader, shape, config),),
    )


class Llama(DecoderLM):
    """Grouped heads, rotary positions, gated feed-forward, RMSNorm."""

    weight_map: ClassVar[WeightMap] = WeightMap(
        prefixes=("model.",), modules=LLAMA_MODULES, ignored=(ROTARY_TABLES,)
    )

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes."""
        num_layers = reader.num_layers()
        return make_shape(
            reader, (None,) * num_layers, reader.heads(),
            intermediate_size=reader.size("intermediate_size"),
        )  # fmt: skip

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        bias = reader.read(bool, "attention_bias", default=False)
        switches = LlamaSwitches(bias, bias, reader.read(bool, "mlp_bias", default=False))
        return llama_parts(reader, cls.read_sizes(reader), config, build, tied, switches)
