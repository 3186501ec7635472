"""Names of files and folders that somebody gave: those that no file can have are refused by field.

The system's calls raise for them what is no OSError, wherever the name is used first. Called by the checks of
engine and server arguments.
"""

from __future__ import annotations

import os

from pagemill.errors import ConfigError


def check_path(field: str, value: str) -> None:
    """Raise ConfigError naming the field for text that can be no path."""
    if "\0" in value:
        raise ConfigError(
            f"{field} is {value!r}; it must be a path, and no path holds the character NUL"
        )
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ConfigError(
            f"{field} is {value!r}; it must be a path, and the file system's encoding has not all of its "
            "characters"
        ) from None
