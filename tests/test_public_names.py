"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pagemill


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    for name in pagemill.__all__:
        assert getattr(pagemill, name) is not None
        assert name in dir(pagemill)
    assert len(set(pagemill.__all__)) == len(pagemill.__all__)
    assert set(pagemill._HOMES) | {"__version__"} == set(pagemill.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LLMM"):
        _ = pagemill.LLMM


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "numpy",
        "tokenizers",
        "transformers",
        "fastapi",
        "prometheus_client",
        "jinja2",
    )
    code = f"import sys, pagemill; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
