"""Dtype rules of the CPU, and the registry of devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pagemill.device import DEVICES, resolve_device
from pagemill.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("requested", "checkpoint", "settled"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "bfloat16"),
        ("auto", "float64", "float32"),
        ("float", "bfloat16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtype_is_settled_with_a_reason(requested: str, checkpoint: str, settled: str) -> None:
    dtype, reason = DEVICES.load("cpu")().resolve_dtype(requested, checkpoint)
    assert dtype == settled and reason


@pytest.mark.parametrize("requested", ["float16", "half"])
def test_float16_is_refused_with_what_to_use(requested: str) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        DEVICES.load("cpu")().resolve_dtype(requested, "float16")


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'int8'.*float32 or bfloat16"):
        DEVICES.load("cpu")().resolve_dtype("int8", "float32")


def test_auto_is_the_cpu() -> None:
    assert resolve_device("auto")[0] == resolve_device("cpu")[0] == "cpu"


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_unknown_device_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown device '{name}'; known: cpu"):
        resolve_device(name)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    device = DEVICES.load("cpu")()
    try:
        device.configure(1)
        assert torch.get_num_threads() == 1
    finally:
        device.configure(before)


def test_importing_the_rooms_of_choices_costs_no_torch() -> None:
    code = (
        "import sys, pagemill.device, pagemill.executor, pagemill.device.host;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
