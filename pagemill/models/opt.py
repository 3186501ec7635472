"""OPT: learned positions that start at row 2, ReLU, norms before or after. Zhang et al. 2022."""

from __future__ import annotations

from pagemill.attention.base import AttentionSpec
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, LearnedPositions, TokenEmbedding
from pagemill.layers.linear import Linear
from pagemill.layers.mlp import MLP, MLPOptions
from pagemill.layers.norm import LayerNorm
from pagemill.models.blocks import DecoderLM, Parts, PostNormLayer, PreNormLayer
from pagemill.models.config_reader import ConfigReader, make_shape
from pagemill.models.weight_map import WeightMap

_POSITION_OFFSET = 2
_NORM_EPS = 1e-5


class OPT(DecoderLM):
    """The 350m model norms after each part and embeds in fewer dimensions than it computes."""

    weight_map = WeightMap(
        prefixes=("model.decoder.", "decoder."),
        modules={
            "embed_tokens": "embedding",
            "embed_positions": "positions",
            "project_in": "project_in",
            "project_out": "project_out",
            "layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
            "layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
            "layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
            "layers.{}.self_attn.out_proj": "layers.{}.attention.out",
            "layers.{}.self_attn_layer_norm": "layers.{}.attention_norm",
            "layers.{}.fc1": "layers.{}.mlp.up",
            "layers.{}.fc2": "layers.{}.mlp.down",
            "layers.{}.final_layer_norm": "layers.{}.mlp_norm",
            "final_layer_norm": "norm",
            "lm_head": "head",
        },
    )
    ties_by_default = True
    scaling_stretches = False

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes."""
        num_layers = reader.num_layers()
        return make_shape(
            reader, (None,) * num_layers, reader.heads(), intermediate_size=reader.size("ffn_dim")
        )

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        shape = cls.read_sizes(reader)
        hidden = shape.hidden_size
        bias = reader.read(bool, "enable_bias", default=True)
        affine = reader.read(bool, "layer_norm_elementwise_affine", default=True)
        before = reader.read(bool, "do_layer_norm_before", default=True)
        no_last = reader.read(bool, "_remove_final_layer_norm", default=False)
        activation = reader.activation("activation_function", default="relu")
        mlp = MLPOptions(hidden, shape.intermediate_size, activation, bias)
        options = AttentionOptions(hidden_size=hidden, qkv_bias=bias, out_bias=bias)

        def norm() -> LayerNorm:
            return LayerNorm(hidden, _NORM_EPS, build, affine=affine)

        layer_class = PreNormLayer if before else PostNormLayer
        layers = []
        for index, layer in enumerate(shape.layers):
            spec = AttentionSpec(
                num_heads=shape.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.head_dim**-0.5,
            )
            attention = Attention(index, spec, options, build)
            layers.append(layer_class(attention, MLP(mlp, build), (norm(), norm())))
        width = reader.size("word_embed_proj_dim", default=hidden)
        embedding = TokenEmbedding(shape.vocab_size, width, build)
        rows = shape.max_position + _POSITION_OFFSET
        return Parts(
            embedding=embedding,
            layers=layers,
            norm=norm() if before and not no_last else None,
            head=Head(embedding, build, tied=tied),
            positions=LearnedPositions(rows, hidden, build, offset=_POSITION_OFFSET),
            project_in=Linear(width, hidden, build) if width != hidden else None,
            project_out=Linear(hidden, width, build) if width != hidden else None,
        )
