"""A pytest plugin: the tests run with the native extension in the folder that EXTENSION_FOLDER names.

`make sanitize` runs the tests of the operations with a build that is not the one in use:
`EXTENSION_FOLDER=... pytest -p tests.native.instrumented`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pagemill

FOLDER = os.environ["EXTENSION_FOLDER"]
pagemill.__path__.insert(0, FOLDER)
# The sanitizers' libraries are in this process; compilers that tests start are slow with them.
os.environ.pop("LD_PRELOAD", None)


def pytest_configure() -> None:
    """Make sure that no other build is tested."""
    import torch  # noqa: F401  (first: see pagemill.native)

    from pagemill import native

    found = native.required().__file__
    assert found is not None and Path(found).parent == Path(FOLDER), found
