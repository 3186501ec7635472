"""Rotary position embedding: from a checkpoint's settings to the angles of a step.

Owns the kinds of rotary scaling (`KINDS`: one function and one line each) and both spellings of their
settings. Models make one `Rope` a kind of layer when they are built, and call `prepare` once a step; all
layers of that kind share the result:

    rope = make_rope(rope_settings(hf_config), head_dim=..., max_position=..., max_model_len=...)
    turn = rope.prepare(positions, dtype)        per step
    q, k = turn.apply(q, k)                      per layer (or ops.split_heads, which does more)

Angles are computed for the positions of the step; there is no table over all positions.

"dynamic" and "longrope" choose their frequencies by length. Here that length is `max_model_len`, never
the length that a sequence happens to have: a token's key would otherwise depend on when it was computed.
Hugging Face's `transformers` goes by the current sequence instead. Both agree, for "dynamic", when
max_model_len <= max_position (and every sequence fits it) or when its sequence is max_model_len long;
for "longrope", when both lengths lie on the same side of the original context. The other kinds depend on
no length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import CheckpointError
from pagemill.ops import reference
from pagemill.ops.base import LayerOps, Rotation
from pagemill.ops.plain import PlainOps

DEFAULT_BASE = 10000.0
_PLAIN = PlainOps()


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The frequencies of one kind of layer."""

    inv_freq: Tensor  # [rotary_dim / 2] float32, radians a position
    attention_scaling: float  # multiplies cos and sin
    style: str = "neox"

    @property
    def rotary_dim(self) -> int:
        """Return how many leading elements of a head are turned."""
        return 2 * self.inv_freq.shape[0]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cos and sin, each [num_tokens, rotary_dim / 2], of int64 positions."""
        inv_freq = self.inv_freq.to(positions.device)
        return reference.angles(positions, inv_freq, self.attention_scaling)

    def prepare(self, positions: Tensor, dtype: torch.dtype, ops: LayerOps = _PLAIN) -> Rotation:
        """Return the rotation of a step's tokens; positions [num_tokens] int64."""
        inv_freq = self.inv_freq.to(positions.device)
        cos, sin = ops.angles(positions, inv_freq, self.attention_scaling, dtype)
        return Rotation(cos, sin, self.style)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kind's function may use beside its settings."""

    rotary_dim: int
    base: float
    max_position: int
    max_model_len: int

    def inv_freq(self, base: float | None = None) -> Tensor:
        """Return base^(-2i / rotary_dim), float32."""
        return 1.0 / (self.base if base is None else base) ** self.exponents()

    def exponents(self) -> Tensor:
        """Return 2i / rotary_dim for i < rotary_dim / 2, float32."""
        # The device is named: models may be built under a default device that holds no data.
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu")
        return steps / self.rotary_dim


_Settings = Mapping[str, Any]


def _default(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """Su et al. 2021."""
    return shape.inv_freq(), 1.0


def _linear(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """Position interpolation, Chen et al. 2023: every position is divided by `factor`."""
    return shape.inv_freq() / _number(settings, "factor"), 1.0


def _dynamic(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """NTK-aware scaling: a larger base for contexts over `max_position`, by max_model_len."""
    factor = _number(settings, "factor")
    length = max(shape.max_model_len, shape.max_position)
    stretch = factor * length / shape.max_position - (factor - 1)
    dim = shape.rotary_dim
    if dim <= 2:
        raise CheckpointError(
            f"rotary kind 'dynamic' needs more than 2 rotated elements, has {dim}"
        )
    return shape.inv_freq(shape.base * stretch ** (dim / (dim - 2))), 1.0


def _llama3(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are divided by `factor`, short ones kept, those between blended."""
    factor = _number(settings, "factor")
    low = _number(settings, "low_freq_factor")
    high = _number(settings, "high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"rotary setting high_freq_factor is {high}; it must be over low_freq_factor, {low}"
        )
    original = _original_context(settings, shape)
    inv_freq = shape.inv_freq()
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    long_waves = wavelength > original / low
    short_waves = wavelength < original / high
    scaled = torch.where(long_waves, inv_freq / factor, blended)
    return torch.where(short_waves, inv_freq, scaled), 1.0


def _yarn(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """YaRN, Peng et al. 2023: interpolate slow dimensions, keep fast ones, sharpen attention."""
    original = _original_context(settings, shape)
    factor = _number(settings, "factor", shape.max_position / original)
    slow_to_fast = [
        # The dimension that turns this many times over the original context (section 3.2).
        shape.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(shape.base))
        for turns in (_number(settings, "beta_fast", 32.0), _number(settings, "beta_slow", 1.0))
    ]
    low, high = slow_to_fast
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    half = torch.arange(shape.rotary_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((half - low) / (high - low)).clamp_(0, 1)
    frequencies = shape.base ** shape.exponents()
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inv_freq, _yarn_scaling(settings, factor)


def _yarn_scaling(settings: _Settings, factor: float) -> float:
    """Return the sharpening of YaRN's equation 22; DeepSeek's two mscales give a ratio."""

    def at(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return at(_number(settings, "mscale")) / at(_number(settings, "mscale_all_dim"))
    return at(1.0)


def _longrope(settings: _Settings, shape: _Shape) -> tuple[Tensor, float]:
    """LongRoPE, Ding et al. 2024: a searched divisor a dimension; long ones past the original."""
    original = _original_context(settings, shape)
    name = "long_factor" if shape.max_model_len > original else "short_factor"
    divisors = torch.tensor(_factors(settings, name, shape), dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / (divisors * shape.base ** shape.exponents())
    if settings.get("attention_factor") is not None:
        return inv_freq, _number(settings, "attention_factor")
    factor = _number(settings, "factor", shape.max_position / original)
    if factor <= 1.0:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(original))


KINDS: dict[str, Callable[[_Settings, _Shape], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # the name that early Phi-3 files use
}


def make_rope(
    settings: Mapping[str, Any] | None,
    *,
    head_dim: int,
    max_position: int,
    max_model_len: int,
    base: float = DEFAULT_BASE,
    style: str = "neox",
) -> Rope:
    """Return the rope that a checkpoint's settings describe; None or {} is the default kind.

    `settings` is one layer kind's flat dictionary, in either spelling; `rope_theta` in it wins over
    `base`. `max_position` is the checkpoint's max_position_embeddings. Raises CheckpointError for an
    unknown kind and for a missing or impossible value.
    """
    settings = settings or {}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    function = KINDS.get(kind) if isinstance(kind, str) else None
    if function is None:
        known = ", ".join(sorted(KINDS))
        raise CheckpointError(f"unknown rotary kind {kind!r} (rope_type); known: {known}")
    share = _number(settings, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"rotary setting partial_rotary_factor is {share}: it turns {rotary_dim} of {head_dim} "
            "elements of a head; that must be an even number from 2 to all"
        )
    theta = _number(settings, "rope_theta", base)
    if theta <= 1.0:
        raise CheckpointError(f"rotary setting rope_theta is {theta}; it must be over 1")
    inv_freq, scaling = function(settings, _Shape(rotary_dim, theta, max_position, max_model_len))
    return Rope(inv_freq, float(scaling), style)


def rope_settings(
    hf_config: Mapping[str, Any],
    *,
    layer_type: str | None = None,
    default_base: float = DEFAULT_BASE,
    local_base: float | None = None,
) -> dict[str, Any]:
    """Return the flat settings of one kind of layer, for `make_rope`, from a config.json.

    Reads `rope_parameters` (flat, or one dictionary a layer type) and the older `rope_scaling` with
    `rope_theta` and `partial_rotary_factor` beside it, also GPT-NeoX's `rotary_emb_base` and
    `rotary_pct`. `default_base` is the family's base where none is written. A family whose
    "sliding_attention" layers have an unscaled rope of their own in the older form (Gemma 3:
    `rope_local_base_freq`) gives its default base as `local_base`. Raises CheckpointError for settings
    that are no dictionary and for a layer type without an entry.
    """
    new = _dictionary(hf_config, "rope_parameters")
    old = _dictionary(hf_config, "rope_scaling")
    nested = any(isinstance(value, Mapping) for value in new.values())
    is_local = local_base is not None and layer_type == "sliding_attention"
    if nested:
        settings = _entry(new, layer_type)
    elif is_local:
        settings = {}
    else:
        settings = dict(old or new)
    if nested and old and layer_type == "full_attention":
        # Both forms at once (Gemma 3): the old one scales the global layers.
        settings.update(old, rope_type=old.get("rope_type") or old.get("type"))
    if not is_local:
        _fill(settings, "rope_theta", hf_config, ("rope_theta", "rotary_emb_base"), default_base)
    else:
        _fill(settings, "rope_theta", hf_config, ("rope_local_base_freq",), local_base)
    shares = ("partial_rotary_factor", "rotary_pct")
    _fill(settings, "partial_rotary_factor", hf_config, shares, 1.0)
    # Written beside the settings (Phi-3), it wins over the one inside.
    original = hf_config.get("original_max_position_embeddings")
    if original is not None and not nested:
        settings["original_max_position_embeddings"] = original
    return settings


def stretched_context(settings: Mapping[str, Any], max_position: int) -> tuple[int, int]:
    """Return (default context, longest context) in tokens that scaled positions allow.

    YaRN's factor counts from the original context, so their product is the context it was made for.
    The factor of "linear" and "dynamic" counts from `max_position` in some checkpoints and is in it
    already in others: the product is a limit, not a default. Other kinds stretch nothing.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "yarn":
        original = _number(settings, "original_max_position_embeddings", max_position)
        factor = _number(settings, "factor", max_position / original)
        context = max(max_position, int(original * factor))
        return context, context
    if kind in ("linear", "dynamic"):
        return max_position, max(max_position, int(max_position * _number(settings, "factor")))
    return max_position, max_position


def _dictionary(hf_config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = hf_config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} in the model's config is {value!r}; it must be a dictionary")
    return dict(value)


def _entry(by_layer_type: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    entry = by_layer_type.get(layer_type) if layer_type is not None else None
    if not isinstance(entry, Mapping):
        known = ", ".join(sorted(by_layer_type))
        raise CheckpointError(
            f"rope_parameters has no settings for layers of type {layer_type!r}; it has: {known}"
        )
    return dict(entry)


def _fill(
    settings: dict[str, Any],
    name: str,
    hf_config: Mapping[str, Any],
    sources: tuple[str, ...],
    fallback: float | None,
) -> None:
    """Set `name` where it is absent: from the first of `sources` that is written, or fallback."""
    if settings.get(name) is None:
        written = [hf_config[key] for key in sources if hf_config.get(key) is not None]
        settings[name] = written[0] if written else fallback


def _number(settings: _Settings, name: str, fallback: float | None = None) -> float:
    """Return a positive number; absent or null is the fallback, and an error without one."""
    value = settings.get(name)
    if value is None and fallback is not None:
        return fallback
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < 2.0**63:  # type: ignore[operator]
        kind = settings.get("rope_type") or settings.get("type") or "default"
        raise CheckpointError(
            f"rotary setting {name} of kind {kind!r} is {value!r}; it must be a number over 0 "
            "and below 2^63"
        )
    assert isinstance(value, (int, float))
    return value


def _original_context(settings: _Settings, shape: _Shape) -> float:
    return _number(settings, "original_max_position_embeddings", shape.max_position)


def _factors(settings: _Settings, name: str, shape: _Shape) -> list[float]:
    values = settings.get(name)
    half = shape.rotary_dim // 2
    if (
        not isinstance(values, (list, tuple))
        or len(values) != half
        or not all(isinstance(v, (int, float)) and v > 0 for v in values)
    ):
        size = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise CheckpointError(
            f"rotary setting {name} has {size}; it must be {half} numbers over 0, one a pair of "
            "rotated elements"
        )
    return [float(value) for value in values]
