"""Gemma 2: soft caps, alternating windows, norms before and after each part. Gemma Team 2024.

`gemma_parts` also builds Gemma 3. Files store norm weights as weight - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.attention.base import AttentionSpec
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.mlp import GatedMLP, MLPOptions
from pagemill.layers.norm import RMSNorm
from pagemill.layers.rope import Rope
from pagemill.models.blocks import DecoderLM, Parts, PreNormLayer, read_rope
from pagemill.models.config_reader import FULL, SLIDING, ConfigReader, make_shape
from pagemill.models.llama import LLAMA_MODULES, ROTARY_TABLES
from pagemill.models.weight_map import WeightMap

GEMMA_MODULES = LLAMA_MODULES | {
    "layers.{}.post_attention_layernorm": "layers.{}.attention_out_norm",
    "layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "layers.{}.post_feedforward_layernorm": "layers.{}.mlp_out_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSwitches:
    """What Gemma 2 and 3 differ in."""

    qk_norm: bool
    attention_softcap: float | None
    final_softcap: float | None
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]


def gemma_sizes(reader: ConfigReader, usual: list[str], *, vocab_size: int | None) -> ModelShape:
    """Read the sizes; `usual` are the layer types where the file names none."""
    reader.require(
        "use_bidirectional_attention", (False,), reason="only causal attention is supported"
    )
    window = reader.nullable(int, "sliding_window", 4096)
    return make_shape(
        reader, reader.windows(window, usual), reader.heads(head_dim=256),
        intermediate_size=reader.size("intermediate_size"), vocab_size=vocab_size,
    )  # fmt: skip


def gemma_parts(
    reader: ConfigReader, shape: ModelShape, build: Build, tied: bool, switches: GemmaSwitches
) -> Parts:
    """Build a Gemma decoder."""
    hidden, eps = shape.hidden_size, reader.positive("rms_norm_eps", default=1e-6)
    bias = reader.read(bool, "attention_bias", default=False)
    mlp = MLPOptions(
        hidden,
        shape.intermediate_size,
        reader.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
    )
    options = AttentionOptions(
        hidden_size=hidden,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=eps if switches.qk_norm else None,
        qk_norm_offset=1.0,
    )
    scale = reader.positive("query_pre_attn_scalar", default=256.0) ** -0.5

    def norm() -> RMSNorm:
        return RMSNorm(hidden, eps, build, offset=1.0)

    layers = []
    for index, layer in enumerate(shape.layers):
        spec = AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=scale,
            sliding_window=layer.sliding_window,
            logit_softcap=switches.attention_softcap,
        )
        layers.append(
            PreNormLayer(
                Attention(index, spec, options, build),
                GatedMLP(mlp, build),
                (norm(), norm()),
                (norm(), norm()),
            )
        )
    embedding = TokenEmbedding(shape.vocab_size, hidden, build, scale=hidden**0.5)
    return Parts(
        embedding=embedding,
        layers=layers,
        norm=norm(),
        head=Head(embedding, build, tied=tied, softcap=switches.final_softcap),
        ropes=switches.ropes,
        layer_ropes=switches.layer_ropes,
    )


class Gemma2(DecoderLM):
    """Every second layer sees a window; scores and logits are soft-capped."""

    weight_map = WeightMap(prefixes=("model.",), modules=GEMMA_MODULES, ignored=(ROTARY_TABLES,))
    ties_by_default = True
    scaling_stretches = False  # the written context has it in already

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        num_layers = reader.num_layers()
        usual = [FULL if index % 2 else SLIDING for index in range(num_layers)]
        return gemma_sizes(reader, usual, vocab_size=None)

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        shape = cls.read_sizes(reader)
        switches = GemmaSwitches(
            qk_norm=False,
            attention_softcap=reader.nullable(float, "attn_logit_softcapping", 50.0),
            final_softcap=reader.nullable(float, "final_logit_softcapping", 30.0),
            ropes=(read_rope(reader, shape, config),),
            layer_ropes=(),
        )
        return gemma_parts(reader, shape, build, tied, switches)
