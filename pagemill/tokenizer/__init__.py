"""Text to token ids and back, chat templates included. One tokenizer per model or adapter.

`load_tokenizer` picks the reader by what lies at the path; a reader is imported when it is chosen. The
engine and the server call it; everything they then use is `pagemill.tokenizer.base.Tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagemill.errors import CheckpointError, ConfigError
from pagemill.registry import Registry
from pagemill.tokenizer.base import Tokenizer

# What lies at a path -> its reader.
READERS: Registry[Callable[[Path], Tokenizer]] = Registry(
    "tokenizer format",
    {
        "gguf": "pagemill.tokenizer.gguf:load_gguf_tokenizer",
        "tokenizer.json": "pagemill.tokenizer.folder:load_folder_tokenizer",
    },
)

MODES = ("auto", "slow")


def load_tokenizer(path: str | Path, *, mode: str = "auto") -> Tokenizer:
    """Load the tokenizer at `path`: a folder, a tokenizer.json or a .gguf file.

    mode "auto" uses the fastest reader that can; "slow" goes through transformers' Python classes, which
    needs the `transformers` extra.
    """
    path = Path(path)
    if mode not in MODES:
        raise ConfigError(f"tokenizer_mode is {mode!r}; it is one of {', '.join(MODES)}")
    if not path.exists():
        raise CheckpointError(f"there is no tokenizer at {path}: no such file or folder")
    return READERS.load(_format_of(path, mode))(path)


def _format_of(path: Path, mode: str) -> str:
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else "tokenizer.json"
    return "tokenizer.json"
