"""Weight formats of linear layers: one file each, one line here. Called by `models.loader`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.quant.base import QuantMethod

# How weights that are not quantized are kept; the device says which it wants.
DENSE_METHODS: Registry[type[QuantMethod]] = Registry(
    "weight format",
    {
        "native": "pagemill.quant.native:NativeDense",
        "torch": "pagemill.quant.none:Unquantized",
    },
)
QUANT_METHODS: Registry[type[QuantMethod]] = Registry(
    "quantization",
    {
        "int4": "pagemill.quant.int4:Int4",
        "int8": "pagemill.quant.int8:Int8",
        "none": "pagemill.quant.none:Unquantized",
    },
)
