"""Where the tokenizer of an engine comes from. No torch: the HTTP process reads it for itself.

Called by `engine.resolve` and by `engine.engine_process`.
"""

from __future__ import annotations

from pathlib import Path

from pagemill.checkpoint import locate
from pagemill.engine_args import EngineArgs
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.base import Tokenizer


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
    return load_tokenizer(tokenizer_path(args), mode=args.tokenizer_mode)
