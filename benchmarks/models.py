"""The model that is measured, fetched once into the cache folder.

The folder form is written by the same code as the tests' oracle folders, so that every engine loads the
same numbers.
"""

from __future__ import annotations

from pathlib import Path

from pagemill import env
from pagemill.checkpoint.pull import pull
from tests.model_files import write_hf_folder

NAME = "smollm2-135m-instruct"


def smollm2_gguf() -> Path:
    """Return SmolLM2-135M-Instruct as a .gguf file."""
    return pull(NAME, progress=False)


def smollm2_folder() -> Path:
    """Return the same weights as a Hugging Face folder in float32."""
    folder = env.cache_dir() / "benchmarks" / NAME
    if not (folder / "tokenizer_config.json").is_file():
        write_hf_folder(smollm2_gguf(), folder)
    return folder
