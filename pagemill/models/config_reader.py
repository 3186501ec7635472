"""Typed reads of config.json, and refusal of what the code does not support.

Every architecture reads its configuration through one `ConfigReader`; errors name the key, the value
and what is legal. Heads and attention windows, which all
families have, are read here; rotary settings in `layers.rope`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pagemill.config import LayerShape, ModelShape
from pagemill.errors import CheckpointError
from pagemill.ops import reference as ops

T = TypeVar("T", int, float, bool, str)

FULL = "full_attention"
SLIDING = "sliding_attention"

# Far over any model; a damaged or hostile file must not make us build what no machine can hold.
MAX_SIZE = 2**30
MAX_LAYERS = 10_000


class ConfigReader:
    """Reads one model's configuration. A null value counts as an absent one."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self.config = hf_config
        self.model_type = str(hf_config.get("model_type", "model"))

    def find(self, *keys: str) -> tuple[str, Any]:
        """Return the first key that has a value, and the value; (first key, None) when none has."""
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        return keys[0], None

    def optional(self, kind: type[T], *keys: str) -> T | None:
        """Return the value of the first key present, or None. A wrong type is a CheckpointError."""
        key, value = self.find(*keys)
        if value is None:
            return None
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise self.error(key, value, f"it must be of type {kind.__name__}")
        return value

    def read(self, kind: type[T], *keys: str, default: T | None = None) -> T:
        """Return the value of the first key present, else the default; without one it is required."""
        value = self.optional(kind, *keys)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"config.json of this {self.model_type} has no {' or '.join(keys)}"
            )
        return default

    def nullable(self, kind: type[T], key: str, default: T | None) -> T | None:
        """Return the value of a key whose null means "off"; only an absent key is the default."""
        return self.optional(kind, key) if key in self.config else default

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return a whole number from 1 to MAX_SIZE."""
        return self._sized(keys, default, MAX_SIZE)

    def num_layers(self, *keys: str) -> int:
        """Return the number of layers, from 1 to MAX_LAYERS."""
        return self._sized(keys or ("num_hidden_layers",), None, MAX_LAYERS)

    def _sized(self, keys: tuple[str, ...], default: int | None, highest: int) -> int:
        value = self.read(int, *keys, default=default)
        if value < 1:
            raise self.error(self.find(*keys)[0], value, "it must be at least 1")
        if value > highest:
            raise self.error(self.find(*keys)[0], value, f"it must be at most {highest}")
        return value

    def positive(self, *keys: str, default: float | None = None) -> float:
        """Return a finite number over 0."""
        value = self.read(float, *keys, default=default)
        if not 0.0 < value < float("inf"):
            raise self.error(self.find(*keys)[0], value, "it must be a number over 0")
        return value

    def activation(self, *keys: str, default: str) -> str:
        """Return the name of a known activation function."""
        key, value = self.find(*keys)
        name = self.read(str, *keys, default=default)
        if name not in ops.ACTIVATIONS:
            raise self.error(key, value, "known: " + ", ".join(sorted(ops.ACTIVATIONS)))
        return name

    def require(self, key: str, supported: Collection[Any], *, reason: str) -> None:
        """Refuse a value of `key` other than the supported ones; an absent key passes."""
        value = self.config.get(key)
        if value is not None and value not in supported:
            raise self.error(key, value, reason)

    def error(self, key: str, value: object, reason: str) -> CheckpointError:
        """Return the error for a key whose value will not do."""
        return CheckpointError(
            f"config.json of this {self.model_type}: {key} is {value!r}; {reason}"
        )

    # ------------------------------------------------------------ what several families share

    def heads(self, *, head_dim: int | None = None) -> tuple[int, int, int]:
        """Return (query heads, K/V heads, head_dim); the default head_dim is hidden / heads."""
        num_heads = self.size("num_attention_heads", "n_head")
        num_kv_heads = self.size("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.error(
                "num_key_value_heads", num_kv_heads, f"it must divide the {num_heads} query heads"
            )
        hidden = self.size("hidden_size", "n_embd")
        given = self.optional(int, "head_dim")
        if given is None and head_dim is None and hidden % num_heads:
            raise self.error(
                "num_attention_heads", num_heads, f"it must divide the hidden size {hidden}"
            )
        size = self.size("head_dim", default=head_dim or hidden // num_heads)
        if num_heads * size > MAX_SIZE:
            raise self.error(
                "head_dim", size, f"with {num_heads} query heads it must be at most "
                f"{MAX_SIZE // num_heads}",
            )  # fmt: skip
        return num_heads, num_kv_heads, size

    def windows(self, window: int | None, default_types: list[str]) -> tuple[int | None, ...]:
        """Return each layer's window: `layer_types` decides where it is given, else the default.

        A window is the number of keys that a query sees, itself included.
        """
        types = self.config.get("layer_types")
        if types is None:
            types = default_types
        if not isinstance(types, (list, tuple)) or len(types) != len(default_types):
            raise self.error("layer_types", types, f"it must list {len(default_types)} layers")
        for kind in types:
            if kind not in (FULL, SLIDING):
                raise self.error("layer_types", kind, f"supported: {FULL}, {SLIDING}")
        if SLIDING not in types:
            return (None,) * len(types)
        if window is None or window < 1:
            raise self.error(
                "sliding_window", window, f"layer_types holds {SLIDING}, so it must be at least 1"
            )
        return tuple(window if kind == SLIDING else None for kind in types)


def make_shape(
    reader: ConfigReader,
    windows: tuple[int | None, ...],
    heads: tuple[int, int, int],
    *,
    intermediate_size: int,
    vocab_size: int | None = None,
) -> ModelShape:
    """Return the sizes that planning needs; `vocab_size` is the family's where none is written."""
    num_heads, num_kv_heads, head_dim = heads
    return ModelShape(
        hidden_size=reader.size("hidden_size", "n_embd"),
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        vocab_size=reader.size("vocab_size", default=vocab_size),
        layers=tuple(
            LayerShape(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=window)
            for window in windows
        ),
        max_position=reader.size("max_position_embeddings", "n_positions", "n_ctx"),
    )
