"""Models by hub id, through huggingface-hub's own cache, login and endpoint settings.

Owns which files of a repository are fetched. Called by `locate`; needs the network only for what the
cache does not hold.
"""

from __future__ import annotations

import re
from pathlib import Path

from pagemill.errors import CheckpointError

# Pickled weights are never fetched: reading them runs code.
ALLOW = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
IGNORE = ["*/*.safetensors", "original/*", "consolidated*.safetensors", "onnx/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id: "owner/name", or "name" alone."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors"))


def download(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the local folder of a hub model, fetching what is missing.

    Raises CheckpointError with the hub's own reason: no network, unknown or gated model, revision.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=ALLOW,
            ignore_patterns=IGNORE,
        )
    except Exception as error:
        # The library lets errors of either of two HTTP stacks through, and its own kinds beside them.
        reason = " ".join(str(error).split()) or type(error).__name__
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(f"the hub gave no model {model!r}{at}: {reason}") from error
    return Path(folder)
