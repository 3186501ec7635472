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
_MOST_CHARACTERS = 24_000  # of each group of settings; the header has 64 KiB for all
_MOST_KEYS = 64  # of settings within settings that are spelled out
_LONG = 60  # characters of a value that a refusal would not show whole


def tier_identity(config: EngineConfig) -> dict[str, Any]:
    """Return the identity, each part under the word that a refusal names. Reads all weights.

    In the order in which a refusal names what differs: what a caller sets and can read comes first.
    """
    model, cache = config.model, config.cache
    device = DEVICES.load(config.device.device)()
    extension = native.extension()
    settings = model.hf_config
    rotary = {key: value for key, value in settings.items() if "rope" in key or "rotary" in key}
    others = {key: value for key, value in settings.items() if key not in rotary}
    return {
        "version": __version__,
        # Of these kinds the factors are a function of the context's length.
        "max_model_len": model.max_model_len if _hangs_on_length(rotary) else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kernel family": "plain torch" if extension is None else str(extension.active_isa()),
        "cache dtype": cache.dtype,
        "cache layout": f"{device.attention_backend}, {layout_of(config).describe()}",
        "adapter": None,  # the base model's blocks; an adapter's have names of their own
        "rotary setting": _readable(rotary),
        "model configuration": _readable(others),
        "weights digest": _weights(model.path, model.load_format),
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


def _readable(settings: dict[str, Any]) -> dict[str, Any] | str:
    """Return settings for a comparison that can say what differs: long values as digests.

    Settings of settings are spelled out, `rope_parameters.rope_theta`. Of a configuration that is too
    long for a header as a whole, there is one digest.
    """
    flat: dict[str, Any] = {}
    _flatten(settings, "", flat)
    if len(json.dumps(flat)) > _MOST_CHARACTERS:
        return _digest(settings)
    return flat


def _flatten(settings: dict[Any, Any], of: str, flat: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict) and 0 < len(value) <= _MOST_KEYS:
            _flatten(value, f"{of}{key}.", flat)
            continue
        text = json.dumps(value, sort_keys=True, default=str)
        flat[f"{of}{key}"] = json.loads(text) if len(text) <= _LONG else f"digest {_digest(value)}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
