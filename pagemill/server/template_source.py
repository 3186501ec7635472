"""A chat template given on the command line: a file's name, or the Jinja source itself."""

from __future__ import annotations

from pathlib import Path

from pagemill.errors import ConfigError


def read_template(value: str) -> str:
    """Return the template's source. What has Jinja marks or lines in it is the source itself."""
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file has
        raise ConfigError(
            f"chat_template {value!r} cannot be read: {error}; give a file, or a template with "
            "{{ }} or {% %} in it"
        ) from None
