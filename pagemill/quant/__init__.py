"""Weight formats of linear layers: one file each, one line here. Called by `models.loader`."""

from __future__ import annotations

from pagemill.quant.base import QuantMethod
from pagemill.registry import Registry

QUANT_METHODS: Registry[type[QuantMethod]] = Registry(
    "quantization", {"none": "pagemill.quant.none:Unquantized"}
)
