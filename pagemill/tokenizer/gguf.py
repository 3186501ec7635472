"""A tokenizer rebuilt from the metadata of a GGUF file.

The keys are those of the GGUF specification, `tokenizer.ggml.*`: the model kind ("gpt2" is byte-level
BPE, "llama" is SentencePiece BPE), tokens, their types, scores or merges, the ids of special tokens, and
the chat templates. Ids equal those of the tokenizer.json the file was made from. Called by
`load_tokenizer`.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.checkpoint.gguf_reader import read_metadata
from pagemill.errors import CheckpointError, NotSupportedError
from pagemill.log import get_logger
from pagemill.tokenizer.byte_level import WORD_RULES, WordRule, build_byte_level
from pagemill.tokenizer.fast import FastTokenizer, TokenizerSettings
from pagemill.tokenizer.scored_bpe import SPACE_MARK, TokenType, build_scored_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = get_logger(__name__)

_KEY = "tokenizer.ggml."
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_KINDS = ("gpt2", "llama")


def load_gguf_tokenizer(path: Path) -> FastTokenizer:
    """Rebuild the tokenizer of a .gguf file."""
    return build_from_metadata(read_metadata(path), str(path))


def build_from_metadata(metadata: dict[str, Any], source: str) -> FastTokenizer:
    """Rebuild a tokenizer from GGUF metadata; `source` names the file in messages."""
    kind = metadata.get(_KEY + "model")
    if kind is None:
        raise CheckpointError(
            f"{source} has no tokenizer: {_KEY}model is missing; pass --tokenizer"
        )
    if kind not in _KINDS:
        raise NotSupportedError(
            f"{source} has a tokenizer of kind {kind!r}; kinds that can be rebuilt: "
            f"{', '.join(_KINDS)}. Pass --tokenizer with a folder that has tokenizer.json"
        )
    tokens = _tokens(metadata, source)
    types = _types(metadata, tokens, source)
    special = _special_tokens(metadata, tokens, source)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens, source)
    else:
        tokens = _marked_spaces(tokens, types)
        backend, adds_bos = _scored(metadata, tokens, types, special, source)
    _add_tokens(backend, tokens, types)
    adds_bos = bool(metadata.get(_KEY + "add_bos_token", adds_bos))
    adds_eos = bool(metadata.get(_KEY + "add_eos_token", False))
    _frame(backend, special, adds_bos=adds_bos, adds_eos=adds_eos)
    return FastTokenizer(backend, TokenizerSettings(source, special, _chat_templates(metadata)))


# --- the two kinds -------------------------------------------------------------------------------------


def _byte_level(metadata: dict[str, Any], tokens: list[str], source: str) -> tuple[Backend, bool]:
    """Build byte-level BPE; return it and whether its family adds a begin token."""
    rule = _word_rule(metadata.get(_KEY + "pre"), source)
    merges = []
    for line in _array(metadata, "merges", source):
        left, space, right = line.partition(" ")
        if not space:
            raise CheckpointError(f"{source}: {_KEY}merges has {line!r}, which is not two tokens")
        merges.append((left, right))
    prefix_space = bool(metadata.get(_KEY + "add_space_prefix", False))
    backend = build_byte_level(tokens, merges, rule, prefix_space=prefix_space)
    return backend, rule.adds_bos


def _word_rule(name: Any, source: str) -> WordRule:
    if name is None or name == "default":
        logger.warning(
            "%s does not say how text is cut into words; GPT-2's rule is used, which other families "
            "do not share (a newer conversion of the model says it)",
            source,
        )
        name = "default"
    rule = WORD_RULES.get(name)
    if rule is None:
        raise NotSupportedError(
            f"{source} cuts words by the rule {name!r} ({_KEY}pre); known rules: "
            f"{', '.join(sorted(WORD_RULES))}. Pass --tokenizer with a folder that has tokenizer.json"
        )
    return rule


def _scored(
    metadata: dict[str, Any],
    tokens: list[str],
    types: Sequence[int],
    special: dict[str, str],
    source: str,
) -> tuple[Backend, bool]:
    """Build SentencePiece BPE, which adds a begin token where the file does not say."""
    scores = _array(metadata, "scores", source)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{source} has {len(tokens)} tokens but {len(scores)} scores")
    backend = build_scored_bpe(
        tokens,
        scores,
        types,
        unknown=special.get("unk_token"),
        space_prefix=bool(metadata.get(_KEY + "add_space_prefix", True)),
    )
    return backend, True


def _marked_spaces(tokens: list[str], types: Sequence[int]) -> list[str]:
    """Spell user-defined runs of spaces with the mark, as tokenizer.json does."""
    return [
        SPACE_MARK * len(token)
        if kind == TokenType.USER_DEFINED and token and not token.strip(" ")
        else token
        for token, kind in zip(tokens, types, strict=True)
    ]


# --- what both share -----------------------------------------------------------------------------------


def _add_tokens(backend: Backend, tokens: list[str], types: Sequence[int]) -> None:
    """Make control tokens special and user-defined ones whole; ids stay as they are."""
    from tokenizers import AddedToken

    def of(*kinds: TokenType) -> list[AddedToken]:
        return [
            AddedToken(token, special=kinds[0] == TokenType.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]

    backend.add_tokens(of(TokenType.USER_DEFINED))
    backend.add_special_tokens(of(TokenType.CONTROL, TokenType.UNKNOWN))


def _frame(backend: Backend, special: dict[str, str], *, adds_bos: bool, adds_eos: bool) -> None:
    """Put the begin and end tokens around what is encoded."""
    from tokenizers import processors

    bos = special.get("bos_token") if adds_bos else None
    eos = special.get("eos_token") if adds_eos else None
    used = [token for token in (bos, eos) if token is not None]
    if not used:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *("$B:1" if part == "$A" else f"{part}:1" for part in single)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )


def _tokens(metadata: dict[str, Any], source: str) -> list[str]:
    tokens = _array(metadata, "tokens", source)
    if not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{source}: {_KEY}tokens holds something that is no string")
    if len(set(tokens)) != len(tokens):
        twice = collections.Counter(tokens).most_common(1)[0][0]
        raise CheckpointError(f"{source}: {_KEY}tokens has {twice!r} twice; ids would be ambiguous")
    return list(tokens)


def _types(metadata: dict[str, Any], tokens: list[str], source: str) -> Sequence[int]:
    types: Sequence[int] = metadata.get(_KEY + "token_type", [TokenType.NORMAL] * len(tokens))
    if isinstance(types, list | array.array) and len(types) == len(tokens):
        return types
    raise CheckpointError(f"{source}: {_KEY}token_type does not have one entry for each token")


def _special_tokens(metadata: dict[str, Any], tokens: list[str], source: str) -> dict[str, str]:
    """Return the special tokens by the names that templates use."""
    found = {}
    for name, key in _SPECIAL_IDS.items():
        token_id = metadata.get(_KEY + key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{source}: {_KEY}{key} is {token_id!r}; it must be between 0 and {len(tokens) - 1}"
            )
        found[name] = tokens[token_id]
    return found


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key[len(prefix) + 1 :]: value
        for key, value in metadata.items()
        if key.startswith(prefix + ".") and isinstance(value, str)
    }
    if isinstance(metadata.get(prefix), str):
        found["default"] = metadata[prefix]
    return found


def _array(metadata: dict[str, Any], name: str, source: str) -> Sequence[Any]:
    found = metadata.get(_KEY + name)
    if found is None:
        raise CheckpointError(f"{source}: {_KEY}{name} is missing")
    if not isinstance(found, list | array.array):
        raise CheckpointError(f"{source}: {_KEY}{name} is a {type(found).__name__}, not an array")
    return found
