"""The last resort: a tokenizer that only the transformers library can read.

It converts what it knows (SentencePiece unigram models, vocabularies with classes of their own) to a
tokenizer of the `tokenizers` library, which is used as any other. transformers is an extra, imported
when this reader is chosen. Called by `load_tokenizer`.
"""

from __future__ import annotations

from pathlib import Path

from pagemill.errors import CheckpointError, ConfigError, NotSupportedError
from pagemill.tokenizer.fast import FastTokenizer
from pagemill.tokenizer.folder import wrap_backend


def load_with_transformers(path: Path) -> FastTokenizer:
    """Load a folder through `AutoTokenizer`; code that comes with a model is not run."""
    folder = path if path.is_dir() else path.parent
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"the tokenizer of {folder} can only be read by transformers, which is not installed: "
            'pip install "pagemill[transformers]"'
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # anything may come out of files that are not a tokenizer
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read: there is no tokenizer.json, and transformers "
            f"says: {error}"
        ) from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise NotSupportedError(
            f"the tokenizer of {folder} is a {type(loaded).__name__}, written in Python, which cannot "
            "be decoded token by token; convert it to a tokenizer.json"
        )
    named = {
        name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
    }
    return wrap_backend(loaded.backend_tokenizer, folder, named=named)
