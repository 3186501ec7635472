"""Files of models: found by name, opened, checked. No torch and no numpy until tensors are read.

Owns the meaning of a model's name (`locate`) and the table of formats. Called by the engine's
configuration, the worker's loader, the tokenizer room (for GGUF metadata) and the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill import env
from pagemill.errors import CheckpointError, ConfigError
from pagemill.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagemill.checkpoint.base import Checkpoint

FORMATS: Registry[Callable[[Path], Checkpoint]] = Registry(
    "checkpoint format",
    {
        "safetensors": "pagemill.checkpoint.safetensors_files:SafetensorsCheckpoint",
        "gguf": "pagemill.checkpoint.gguf_files:GGUFCheckpoint",
    },
)
CONFIG_READERS: Registry[Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = Registry(
    "checkpoint format",
    {
        "safetensors": "pagemill.checkpoint.safetensors_files:read_folder_configs",
        "gguf": "pagemill.checkpoint.gguf_config:read_gguf_configs",
    },
)


def locate(model: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the local folder or .gguf file that `model` names, downloading a hub id if need be.

    Tried in this order: an existing folder or .gguf file, the name of a pulled model, a hub id.
    `revision` and `download_dir` concern the hub alone. Raises ConfigError or CheckpointError saying
    what was tried and what to do.
    """
    from pagemill.checkpoint import hub, pull

    if not model or "\0" in model:
        raise ConfigError(f"model is {model!r}; give a folder, a .gguf file, or a model's name")
    path = Path(model).expanduser()
    if path.is_dir():
        return _inside(path)
    if path.is_file():
        return _checked_file(path)
    pulled = pull.find_pulled(model)
    if pulled is not None:
        return pulled
    tried = (
        f"it is no folder, no file, and no pulled model (in {env.cache_dir() / 'models'}: "
        f"{', '.join(pull.pulled_models()) or 'none'})"
    )
    if model in pull.PULLABLE:
        raise ConfigError(
            f"model {model!r} is not here yet: {tried}. Get it with: pagemill pull {model}"
        )
    if not hub.is_hub_id(model):
        raise ConfigError(f"model {model!r} was not found: {tried}. {pull.advice()}")
    try:
        return _inside(hub.download(model, revision, download_dir))
    except CheckpointError as error:
        raise CheckpointError(
            f"model {model!r} was not found: {tried}. As a hub id: {error}. {pull.advice()}"
        ) from error


def _inside(folder: Path) -> Path:
    """Return the only .gguf file of a folder that holds nothing else to load, else the folder."""
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ConfigError(f"{folder} holds {len(files)} GGUF files ({names}); name one of them")
    return files[0] if files else folder


def _checked_file(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ConfigError(
            f"model {str(path)!r} is a file but no .gguf file; give a .gguf file, or the folder that "
            "holds config.json and the *.safetensors files"
        )
    return path


def checkpoint_format(path: Path) -> str:
    """Return "gguf" for a .gguf file and "safetensors" for a folder."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a model folder or a .gguf file")
    return "safetensors" if path.is_dir() else "gguf"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open and check the model at a local path: every header is verified, no data is read."""
    path = Path(path)
    return FORMATS.load(checkpoint_format(path))(path)


def read_configs(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config, generation_config) of the model at a local path; weights may be absent."""
    path = Path(path)
    return CONFIG_READERS.load(checkpoint_format(path))(path)
