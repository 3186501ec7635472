"""Weight formats of linear layers: one file each, one line here. Called by `models.loader`.

What needs no torch is here too: which format a checkpoint's configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.quant.base import QuantMethod
    from pagemill.quant.stored import Scheme

# How weights that are not quantized are kept; the device says which it wants.
DENSE_METHODS: Registry[type[QuantMethod]] = Registry(
    "weight format",
    {
        "native": "pagemill.quant.native:NativeDense",
        "torch": "pagemill.quant.none:Unquantized",
    },
)
# Made of plain weights while loading. "none": the device's format for plain weights.
QUANT_METHODS: Registry[type[QuantMethod]] = Registry(
    "quantization",
    {
        "int4": "pagemill.quant.int4:Int4",
        "int8": "pagemill.quant.int8:Int8",
        "none": "pagemill.quant.none:Unquantized",
    },
)
# Formats of checkpoints that are quantized already, by `quant_method` of their configuration.
CHECKPOINT_SCHEMES: Registry[Callable[[Mapping[str, Any]], Scheme]] = Registry(
    "quantization of checkpoints",
    {
        "awq": "pagemill.quant.awq:AWQ",
        "compressed-tensors": "pagemill.quant.compressed_tensors:CompressedTensors",
        "fbgemm_fp8": "pagemill.quant.fp8:FP8",
        "fp8": "pagemill.quant.fp8:FP8",
        "gguf": "pagemill.quant.gguf:GGUF",
        "gptq": "pagemill.quant.gptq:GPTQ",
    },
)
_KEYS = ("quantization_config", "compression_config")


def stored_settings(hf_config: Mapping[str, Any]) -> Any:
    """Return what config.json says of quantized weights; None where they are plain."""
    return find_settings(hf_config)[1]


def find_settings(hf_config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key under which config.json describes quantized weights, and what stands there."""
    text = hf_config.get("text_config")
    for source in (hf_config, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if source.get(key) is not None:
                return key, source[key]
    return _KEYS[0], None
