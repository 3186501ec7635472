"""What decoder families share: the layer shapes, and the model around them.

A family's file reads its configuration, builds these parts and names its weights. The residual stream
is one buffer that layers add to in place. Called by the architectures; `loader` fills them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from pagemill.attention.base import AttentionSpec, StepAttention
from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.attention import Attention
from pagemill.layers.base import Build
from pagemill.layers.embedding import Head, LearnedPositions, TokenEmbedding
from pagemill.layers.linear import Linear
from pagemill.layers.mlp import MLP, GatedMLP
from pagemill.layers.norm import Norm, RMSNorm
from pagemill.layers.rope import Rope, make_rope, rope_settings, stretched_context
from pagemill.models.config_reader import FULL, ConfigReader
from pagemill.models.weight_map import WeightMap
from pagemill.ops.base import Rotation
from pagemill.quant.base import AnyTarget

FeedForward = MLP | GatedMLP


class DecoderLayer(Protocol):
    """One layer: reads the residual stream x [num_tokens, hidden] and returns it changed."""

    attention: Attention

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer; x's memory may be used for it.

        `rows` [num_rows] int64: of these alone. Nothing after attention is computed of the others.
        """
        ...

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the most temporary memory beside x, the attention itself excluded."""
        ...


def _kept(rows: Tensor | None, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream and what the heads saw, of the rows that a layer goes on with."""
    if rows is None:
        return x, attended
    return x.index_select(0, rows), attended.index_select(0, rows)


class PreNormLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). Gemma also norms what is added."""

    def __init__(
        self,
        attention: Attention,
        mlp: FeedForward,
        norms: tuple[Norm, Norm],
        out_norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norms
        self.attention_out_norm: RMSNorm | None = out_norms[0] if out_norms else None
        self.mlp_out_norm: RMSNorm | None = out_norms[1] if out_norms else None

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return x, or its rows, with both parts added in place."""
        attended = self.attention.forward(self.attention_norm.forward(x), rotation, attend)
        x, attended = _kept(rows, x, attended)
        if self.attention_out_norm is None:
            self.attention.out.forward(attended, residual=x)
            del attended
        else:
            added = self.attention.out.forward(attended)
            del attended
            self.attention_out_norm.forward(added, residual=x)
            del added
        normed = self.mlp_norm.forward(x)
        if self.mlp_out_norm is None:
            return self.mlp.forward(normed, residual=x)
        added = self.mlp.forward(normed)
        del normed
        return self.mlp_out_norm.forward(added, residual=x)

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the larger peak of the two parts."""
        stream = self.attention.out.peak_bytes_per_token()
        parts = (
            (self.attention_norm, self.attention.peak_bytes_per_token(rotary_dim)),
            (self.mlp_norm, self.mlp.peak_bytes_per_token()),
        )
        peaks = [max(norm.peak_bytes_per_token(), stream + part) for norm, part in parts]
        for out_norm in (self.attention_out_norm, self.mlp_out_norm):
            if out_norm is not None:
                peaks.append(stream + out_norm.peak_bytes_per_token())
        return max(peaks)


class PostNormLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + mlp(x)). Vaswani et al. 2017; OPT-350m."""

    def __init__(self, attention: Attention, mlp: FeedForward, norms: tuple[Norm, Norm]) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the new stream."""
        x, attended = _kept(rows, x, self.attention.forward(x, rotation, attend))
        x = self.attention_norm.forward(self.attention.out.forward(attended, residual=x))
        del attended
        return self.mlp_norm.forward(self.mlp.forward(x, residual=x))

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the larger peak of the two parts; the second runs beside the layer's own x."""
        stream = self.attention.out.peak_bytes_per_token()
        attention = self.attention.peak_bytes_per_token(rotary_dim)
        return max(
            attention,
            stream + max(self.mlp.peak_bytes_per_token(), self.mlp_norm.peak_bytes_per_token()),
        )


class ParallelLayer(nn.Module):
    """x += mlp(norm_2(x)) + attention(norm_1(x)): both see the same x. GPT-NeoX."""

    def __init__(self, attention: Attention, mlp: FeedForward, norms: tuple[Norm, Norm]) -> None:
        super().__init__()
        self.attention = attention
        self.ops = attention.ops
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return x, or its rows, with both parts added in place."""
        attended = self.attention.forward(self.attention_norm.forward(x), rotation, attend)
        x, attended = _kept(rows, x, attended)
        attended = self.attention.out.forward(attended)
        added = self.mlp.forward(self.mlp_norm.forward(x), residual=attended)
        return self.ops.add(x, added)

    def peak_bytes_per_token(self, rotary_dim: int) -> int:
        """Return the larger peak of the two parts; the second runs beside the first's result."""
        stream = self.attention.out.peak_bytes_per_token()
        return stream + max(
            self.attention.peak_bytes_per_token(rotary_dim),
            stream + self.mlp.peak_bytes_per_token(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a decoder; what a family does not have stays None."""

    embedding: TokenEmbedding
    layers: Sequence[DecoderLayer]
    norm: Norm | None
    head: Head
    ropes: tuple[Rope, ...] = ()
    layer_ropes: tuple[int, ...] = ()  # which rope each layer uses; (): all the first, if any
    positions: LearnedPositions | None = None
    project_in: Linear | None = None  # embedding width to hidden
    project_out: Linear | None = None  # hidden to embedding width


class DecoderLM(nn.Module):
    """A decoder over a flat ragged batch; see `models.base.CausalLM`. Families fill `build_parts`."""

    weight_map: ClassVar[WeightMap]
    # What an absent `tie_word_embeddings` means in this family.
    ties_by_default: ClassVar[bool] = False
    # Whether rotary scaling reaches past `max_position_embeddings`: not where positions are learned.
    scaling_stretches: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, build: Build, *, tied: bool) -> None:
        super().__init__()
        self.config = config
        self.build = build
        parts = self.build_parts(self.decoder_config(config.hf_config), config, build, tied)
        self.embedding = parts.embedding
        self.positions = parts.positions
        self.project_in = parts.project_in
        self.layers = nn.ModuleList(cast("list[nn.Module]", list(parts.layers)))
        self.norm = parts.norm
        self.project_out = parts.project_out
        self.head = parts.head
        self.ropes = parts.ropes
        self.layer_ropes = parts.layer_ropes or (0,) * len(parts.layers)

    @classmethod
    def read_shape(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """Read and check the sizes; raises CheckpointError for what the code does not support."""
        return cls.read_sizes(cls.decoder_config(hf_config))

    @classmethod
    def context_lengths(cls, hf_config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the default and the longest context in tokens, rotary scaling counted in."""
        reader = cls.decoder_config(hf_config)
        written = cls.read_sizes(reader).max_position
        if not cls.scaling_stretches:
            return written, written
        return stretched_context(rope_settings(reader.config, layer_type=FULL), written)

    @classmethod
    def decoder_config(cls, hf_config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the part of config.json that describes the decoder."""
        return ConfigReader(hf_config)

    @classmethod
    def ties_head(cls, hf_config: Mapping[str, Any]) -> bool:
        """Return whether the configuration wants the head to share the embedding's matrix."""
        reader = cls.decoder_config(hf_config)
        return reader.read(bool, "tie_word_embeddings", default=cls.ties_by_default)

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read and check the sizes, and refuse what this family's code does not support."""
        raise AssertionError(f"{cls.__name__} must read its sizes")

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts, unfilled."""
        raise AssertionError(f"{cls.__name__} must build its parts")

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Return one spec a layer."""
        return tuple(layer.attention.spec for layer in self._layers())

    def expected_tensors(self) -> dict[str, AnyTarget]:
        """Return where each tensor of a checkpoint goes, by its normalized name."""
        return self.weight_map.expected(self, len(self.layers))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, of `rows` alone where they are given; see `models.base.CausalLM`."""
        # Once a step, not once a layer.
        build = self.build
        rotations = [rope.prepare(positions, build.dtype, build.ops) for rope in self.ropes]
        return self._run(self._embed(token_ids, positions), rotations, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of hidden rows; only rows that need them are passed."""
        return self.head.forward(hidden)

    def peak_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return the most temporary memory of forward and logits together, attention's excluded."""
        itemsize = self.build.dtype.itemsize
        hidden = self.embedding.shape.in_features * itemsize
        stream = self._layers()[0].attention.out.peak_bytes_per_token()
        rotary_dims = [rope.rotary_dim for rope in self.ropes]
        layers = max(
            layer.peak_bytes_per_token(rotary_dims[rope] if rotary_dims else 0)
            for layer, rope in zip(self._layers(), self.layer_ropes, strict=True)
        )
        last = 0 if self.norm is None else self.norm.peak_bytes_per_token()
        forward = stream + max(layers, last, hidden) + itemsize * sum(rotary_dims)
        vocab = self.embedding.shape.out_features
        logits = vocab * (4 if itemsize == 4 else 4 + itemsize)
        # The last layer may end beside its own input, on the rows that need logits.
        ending = num_tokens * forward + num_logit_rows * stream
        return max(ending, num_tokens * hidden + num_logit_rows * logits)

    def _layers(self) -> Sequence[DecoderLayer]:
        return cast("Sequence[DecoderLayer]", self.layers)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding.forward(token_ids)
        if self.project_in is not None:
            x = self.project_in.forward(x)
        if self.positions is not None:
            x = self.positions.forward(x, positions)
        return x

    def _run(
        self, x: Tensor, rotations: list[Rotation], attend: StepAttention, rows: Tensor | None
    ) -> Tensor:
        layers = self._layers()
        last = layers[-1]
        for layer, rope in zip(layers, self.layer_ropes, strict=True):
            # What comes after the last attention sees one row at a time, and no other layer reads it.
            kept = rows if layer is last else None
            x = layer.forward(x, rotations[rope] if rotations else None, attend, kept)
        if self.norm is not None:
            x = self.norm.forward(x)
        if self.project_out is not None:
            x = self.project_out.forward(x)
        return x


def read_rope(
    reader: ConfigReader,
    shape: ModelShape,
    config: ModelConfig,
    *,
    layer_type: str = FULL,
    default_base: float = 10000.0,
    local_base: float | None = None,
) -> Rope:
    """Return the rope of one kind of layer, from either spelling of its settings."""
    settings = rope_settings(
        reader.config, layer_type=layer_type, default_base=default_base, local_base=local_base
    )
    return make_rope(
        settings,
        head_dim=shape.layers[0].head_dim,
        max_position=shape.max_position,
        max_model_len=config.max_model_len,
    )
