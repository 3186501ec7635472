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
from pagemill.tokenizer.library_panics import panics_as_errors

# What lies at a path -> its reader.
READERS: Registry[Callable[[Path], Tokenizer]] = Registry(
    "tokenizer format",
    {
        "gguf": "pagemill.tokenizer.gguf:load_gguf_tokenizer",
        "sentencepiece": "pagemill.tokenizer.sentencepiece_model:load_sentencepiece_tokenizer",
        "tekken": "pagemill.tokenizer.tekken:load_tekken_tokenizer",
        "tokenizer.json": "pagemill.tokenizer.folder:load_folder_tokenizer",
        "transformers": "pagemill.tokenizer.transformers_reader:load_with_transformers",
    },
)

MODES = ("auto", "slow")

# The files of a folder in the order in which they are tried.
_FILES = {
    "tokenizer.json": "tokenizer.json",
    "tekken.json": "tekken",
    "tokenizer.model": "sentencepiece",
}
_LAST = "transformers"


def load_tokenizer(path: str | Path, *, mode: str = "auto") -> Tokenizer:
    """Load the tokenizer at `path`: a folder, or a tokenizer.json, .gguf, .model or tekken.json file.

    mode "auto" reads the files itself where it can; "slow" asks transformers, which is an extra.
    """
    path = Path(path)
    if mode not in MODES:
        raise ConfigError(f"tokenizer_mode is {mode!r}; it is one of {', '.join(MODES)}")
    if not path.exists():
        raise CheckpointError(f"there is no tokenizer at {path}: no such file or folder")
    with panics_as_errors(path):
        return READERS.load("transformers" if mode == "slow" else _format_at(path))(path)


def _format_at(path: Path) -> str:
    """Return the name of the reader for what lies at `path`."""
    if path.is_dir():
        return next((name for file, name in _FILES.items() if (path / file).is_file()), _LAST)
    if path.name in _FILES:
        return _FILES[path.name]
    if path.suffix == ".json":
        return "tekken" if path.name.startswith("tekken") else "tokenizer.json"
    return {".gguf": "gguf", ".model": "sentencepiece"}.get(path.suffix, _LAST)
