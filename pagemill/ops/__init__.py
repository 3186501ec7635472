"""Single operations on tensors, without knowledge of models, blocks or batches.

`reference` holds each one in plain torch. Called by `layers` and `attention`.
"""

from __future__ import annotations

from pagemill.ops.base import LayerOps
from pagemill.registry import Registry

# What layers compute with; the device says which it wants.
LAYER_OPS: Registry[type[LayerOps]] = Registry(
    "set of layer operations",
    {
        "native": "pagemill.ops.cpu_layers:NativeOps",
        "torch": "pagemill.ops.plain:PlainOps",
    },
)
