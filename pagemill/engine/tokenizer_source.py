"""Where the tokenizer of an engine comes from. No torch: the HTTP process reads it for itself.

Called by `engine.resolve` and by `engine.engine_process`.
"""

from __future__ import annotations

from pathlib import Path

from pagemill.checkpoint import locate, read_configs
from pagemill.device import host
from pagemill.engine_args import EngineArgs
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.base import Tokenizer

# Measured: 11 to 15 bytes for a byte of tokenizer.json, 0.9 to 1.4 KiB for a token.
_LEAST_BYTES = 16 << 20
_TIMES_THE_FILE = 15
_TOKEN_BYTES = 1536


def tokenizer_path(args: EngineArgs) -> Path:
    """Return the folder or file that the tokenizer is read from."""
    name = args.tokenizer or args.model
    path = Path(name).expanduser()
    if path.is_file():
        return path
    revision = args.tokenizer_revision or (args.revision if args.tokenizer is None else None)
    return locate(name, revision=revision, download_dir=args.download_dir)


def read_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """Load the tokenizer; None with skip_tokenizer_init. Imports no torch."""
    if args.skip_tokenizer_init:
        return None
    path = tokenizer_path(args)
    if host.address_space_left() is not None:
        host.require_room(_reading_bytes(path), f"the tokenizer of {path} was read")
    return load_tokenizer(path, mode=args.tokenizer_mode)


def _reading_bytes(path: Path) -> int:
    """Return the most that reading a tokenizer was seen to take, by the size of its vocabulary.

    The library that reads it ends the process where it is refused memory.
    """
    file = path / "tokenizer.json"
    if file.is_file():
        return _LEAST_BYTES + _TIMES_THE_FILE * file.stat().st_size
    if path.suffix != ".gguf":
        return _LEAST_BYTES
    return _LEAST_BYTES + _TOKEN_BYTES * int(read_configs(path)[0].get("vocab_size", 0))
