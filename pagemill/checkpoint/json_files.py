"""JSON files of a model, read with errors that name file, line and column.

Owns nothing. Called by the readers of this room and by whoever reads a tokenizer's JSON files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagemill.checkpoint.unreadable import unreadable
from pagemill.errors import CheckpointError

# Far above any config or tokenizer file; a bigger one is not what its name says.
MAX_JSON_BYTES = 512 * 1024**2


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; CheckpointError names the place of a mistake."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes; a JSON file of a model has at most {MAX_JSON_BYTES}"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, source: str) -> dict[str, Any]:
    """Return the object in `raw` (UTF-8, a byte order mark allowed); `source` names it in errors."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{source} is not UTF-8 text: byte {raw[error.start]:#04x} at offset {error.start}"
        ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}; download or write the file again"
        ) from error
    except RecursionError as error:
        raise CheckpointError(f"{source} is not usable JSON: it is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointError(f"{source} is not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source} holds a JSON {type(value).__name__}, but an object {{...}} is needed"
        )
    return value
