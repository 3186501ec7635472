"""What a lasting tier file belongs to: all that the bits of a block hang on beside its name.

The name of a block covers its tokens and the request's own keys (adapters, salts). The rest is here: another
model, dtype, kernel family, layout, rotary setting or version has other bits under the same names. Called by
`worker.host_tier`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pagemill import native
from pagemill.cache_layout import layout_of
from pagemill.config import EngineConfig
from pagemill.device import DEVICES
from pagemill.version import __version__

_CHUNK_BYTES = 1 << 22


def tier_identity(config: EngineConfig) -> dict[str, str | int | None]:
    """Return the identity, each part under the word that a refusal names. Reads all weights."""
    model, cache = config.model, config.cache
    device = DEVICES.load(config.device.device)()
    extension = native.extension()
    settings = model.hf_config
    rotary = {key: value for key, value in settings.items() if "rope" in key or "rotary" in key}
    return {
        "version": __version__,
        "model": _weights(model.path, model.load_format),
        "model configuration": _digest(settings),
        "rotary setting": _digest(rotary),
        # Of these kinds the factors are a function of the context's length.
        "max_model_len": model.max_model_len if _hangs_on_length(rotary) else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kernel family": "plain torch" if extension is None else str(extension.active_isa()),
        "cache dtype": cache.dtype,
        "cache layout": f"{device.attention_backend}, {layout_of(config).describe()}",
        "adapter": None,  # the base model's blocks; an adapter's have names of their own
    }


def _hangs_on_length(rotary: dict[str, Any]) -> bool:
    text = json.dumps(rotary, default=str)
    return any(f'"{kind}"' in text for kind in ("dynamic", "longrope", "su"))


def _weights(path: str, load_format: str) -> str:
    """Return a digest of the weights themselves: a file may be replaced under its name."""
    if load_format == "dummy":
        return "random weights"
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.stat().st_size}\n".encode())
        with file.open("rb") as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
