"""GPT-2: learned positions, LayerNorm, matrices stored [in, out]. Radford et al. 2019."""

from __future__ import annotations

from pagemill.attention.base import AttentionSpec
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, LearnedPositions, TokenEmbedding
from pagemill.layers.mlp import MLP, MLPOptions
from pagemill.layers.norm import LayerNorm
from pagemill.models.blocks import DecoderLM, Parts, PreNormLayer
from pagemill.models.config_reader import ConfigReader, make_shape
from pagemill.models.weight_map import WeightMap


class GPT2(DecoderLM):
    """Pre-norm layers with biases everywhere and a tied head."""

    weight_map = WeightMap(
        prefixes=("transformer.",),
        modules={
            "wte": "embedding",
            "wpe": "positions",
            "h.{}.ln_1": "layers.{}.attention_norm",
            "h.{}.attn.c_attn": "layers.{}.attention.qkv:transposed",
            "h.{}.attn.c_proj": "layers.{}.attention.out:transposed",
            "h.{}.ln_2": "layers.{}.mlp_norm",
            "h.{}.mlp.c_fc": "layers.{}.mlp.up:transposed",
            "h.{}.mlp.c_proj": "layers.{}.mlp.down:transposed",
            "ln_f": "norm",
            "lm_head": "head",
        },
        embedding="wte",
        # The causal mask, which the published files carry as a tensor.
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    )
    ties_by_default = True
    scaling_stretches = False

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes."""
        reader.require(
            "add_cross_attention", (False,), reason="only decoders without an encoder are supported"
        )
        hidden = reader.size("hidden_size", "n_embd")
        num_layers = reader.num_layers("num_hidden_layers", "n_layer")
        return make_shape(
            reader, (None,) * num_layers, reader.heads(),
            intermediate_size=reader.size("n_inner", default=4 * hidden),
        )  # fmt: skip

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        shape = cls.read_sizes(reader)
        hidden, eps = shape.hidden_size, reader.positive("layer_norm_epsilon", default=1e-5)
        activation = reader.activation("activation_function", default="gelu_new")
        mlp = MLPOptions(hidden, shape.intermediate_size, activation, bias=True)
        options = AttentionOptions(hidden_size=hidden, qkv_bias=True, out_bias=True)
        scaled = reader.read(bool, "scale_attn_weights", default=True)
        by_layer = reader.read(bool, "scale_attn_by_inverse_layer_idx", default=False)
        layers = []
        for index, layer in enumerate(shape.layers):
            scale = layer.head_dim**-0.5 if scaled else 1.0
            spec = AttentionSpec(
                num_heads=shape.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=scale / (index + 1) if by_layer else scale,
            )
            norms = (LayerNorm(hidden, eps, build), LayerNorm(hidden, eps, build))
            layers.append(
                PreNormLayer(Attention(index, spec, options, build), MLP(mlp, build), norms)
            )
        embedding = TokenEmbedding(shape.vocab_size, hidden, build)
        return Parts(
            embedding=embedding,
            layers=layers,
            norm=LayerNorm(hidden, eps, build),
            head=Head(embedding, build, tied=tied),
            positions=LearnedPositions(shape.max_position, hidden, build),
        )
