"""A tokenizer from Mistral's tekken.json: ranked byte strings, special tokens in front.

The vocabulary is that of a tiktoken file: two neighbours may merge when the joined bytes are a token, the
lowest rank first; ids are ranks behind the special tokens. Called by `load_tokenizer`.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from pagemill.errors import CheckpointError
from pagemill.tokenizer.byte_level import WordRule, build_byte_level
from pagemill.tokenizer.decoding import byte_level_alphabet
from pagemill.tokenizer.fast import FastTokenizer
from pagemill.tokenizer.folder import wrap_backend
from pagemill.tokenizer.scored_bpe import TokenType, derive_merges

# Files up to version 7 do not list them.
_OLD_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def load_tekken_tokenizer(path: Path) -> FastTokenizer:
    """Load a tekken.json, or a folder with one."""
    file = path / "tekken.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        config = found["config"]
        special = _special_tokens(found, int(config["default_num_special_tokens"]))
        ranked = _ranked_tokens(found, int(config["default_vocab_size"]) - len(special))
        pattern = str(config["pattern"])
    except (ValueError, TypeError, LookupError, binascii.Error) as error:
        raise CheckpointError(
            f"{file} is not a tekken vocabulary: {type(error).__name__}: {error}"
        ) from error
    scores = [-float(rank) for rank in range(len(ranked))]
    merges = derive_merges(ranked, scores, [TokenType.NORMAL] * len(ranked))
    backend = build_byte_level(
        [*special, *ranked], merges, WordRule(pattern, whole_words=True, adds_bos=True)
    )
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    named = {name: token for name, token in _NAMED.items() if token in special}
    return wrap_backend(backend, file.parent, named=named, adds_bos=True)


def _special_tokens(found: dict[str, Any], count: int) -> list[str]:
    """Return the special tokens by id; places that the file leaves open get filler names."""
    listed = found.get("special_tokens")
    if listed is None:
        listed = [{"rank": i, "token_str": token} for i, token in enumerate(_OLD_SPECIAL_TOKENS)]
    tokens = [f"<SPECIAL_{i}>" for i in range(count)]
    for entry in listed:
        tokens[int(entry["rank"])] = str(entry["token_str"])
    return tokens


def _ranked_tokens(found: dict[str, Any], count: int) -> list[str]:
    """Return the first `count` tokens by rank, in the byte-level alphabet."""
    spelled = {byte: character for character, byte in byte_level_alphabet().items()}
    tokens = [""] * count
    for entry in found["vocab"]:
        if entry["rank"] < count:
            data = base64.b64decode(entry["token_bytes"], validate=True)
            tokens[entry["rank"]] = "".join(map(spelled.__getitem__, data))
    if "" in tokens:
        raise ValueError(f"rank {tokens.index('')} of {count} is missing")
    return tokens
