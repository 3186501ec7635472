"""A pytest plugin: take the native extension from the folder that EXTENSION_FOLDER names.

`make sanitize` runs the tests of the operations with a build that is not the one in use:
`EXTENSION_FOLDER=... pytest -p tests.native.from_folder`.
"""

from __future__ import annotations

import os

import pagemill

pagemill.__path__.insert(0, os.environ["EXTENSION_FOLDER"])
