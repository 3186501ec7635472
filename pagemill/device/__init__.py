"""Where tensors live: memory, threads and dtype rules of each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.device.base import Device

DEVICES: Registry[type[Device]] = Registry(
    "device",
    {
        "cpu": "pagemill.device.cpu:CPUDevice",
    },
)


def resolve_device(requested: str) -> tuple[str, str]:
    """Return the registry key that `requested` stands for, and the reason."""
    if requested == "auto":
        return "cpu", "the one device of this version"
    DEVICES.load(requested)
    return requested, "asked for"
