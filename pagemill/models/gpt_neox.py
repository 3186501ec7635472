"""GPT-NeoX and Pythia: attention and feed-forward side by side, part of a head turned.

Black et al. 2022, Biderman et al. 2023. The files interleave q, k and v head by head.
"""

from __future__ import annotations

from pagemill.attention.base import AttentionSpec
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention, AttentionOptions
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, TokenEmbedding
from pagemill.layers.mlp import MLP, MLPOptions
from pagemill.layers.norm import LayerNorm
from pagemill.models.blocks import DecoderLM, ParallelLayer, Parts, PreNormLayer, read_rope
from pagemill.models.config_reader import ConfigReader, make_shape
from pagemill.models.weight_map import WeightMap

_ROTARY_SHARE = 0.25


class GPTNeoX(DecoderLM):
    """Parallel or sequential residuals, LayerNorm, biases."""

    weight_map = WeightMap(
        prefixes=("gpt_neox.",),
        modules={
            "embed_in": "embedding",
            "layers.{}.input_layernorm": "layers.{}.attention_norm",
            "layers.{}.attention.query_key_value": "layers.{}.attention.qkv:by_head",
            "layers.{}.attention.dense": "layers.{}.attention.out",
            "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
            "layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up",
            "layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down",
            "final_layer_norm": "norm",
            "lm_head": "head",
        },
        embedding="embed_in",
        aliases=(("embed_out", "lm_head"),),
        # The causal mask and the rotary table, which older files carry as tensors.
        ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    )

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes."""
        num_heads = reader.size("num_attention_heads")
        reader.require(
            "num_key_value_heads", (num_heads,), reason=f"it must equal the {num_heads} query heads"
        )
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
        shape = cls.read_sizes(reader)
        hidden, eps = shape.hidden_size, reader.positive("layer_norm_eps", default=1e-5)
        bias = reader.read(bool, "attention_bias", default=True)
        parallel = reader.read(bool, "use_parallel_residual", default=True)
        activation = reader.activation("hidden_act", default="gelu")
        mlp = MLPOptions(hidden, shape.intermediate_size, activation, bias=True)
        options = AttentionOptions(hidden_size=hidden, qkv_bias=bias, out_bias=bias)
        layer_class = ParallelLayer if parallel else PreNormLayer
        layers = []
        for index, layer in enumerate(shape.layers):
            spec = AttentionSpec(
                num_heads=shape.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.head_dim**-0.5,
            )
            norms = (LayerNorm(hidden, eps, build), LayerNorm(hidden, eps, build))
            layers.append(
                layer_class(Attention(index, spec, options, build), MLP(mlp, build), norms)
            )
        embedding = TokenEmbedding(shape.vocab_size, hidden, build)
        with_share = ConfigReader({"rotary_pct": _ROTARY_SHARE, **reader.config})
        return Parts(
            embedding=embedding,
            layers=layers,
            norm=LayerNorm(hidden, eps, build),
            head=Head(embedding, build, tied=tied),
            ropes=(read_rope(with_share, shape, config),),
        )
