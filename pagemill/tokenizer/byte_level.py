"""Byte-level BPE for the `tokenizers` library, from tokens and merges.

A byte-level vocabulary works on words, and how text is cut into words is not in the vocabulary: files
name a rule ("pre-tokenizer"). The rules here are those of the tokenizer.json files of the families that
the names stand for. Called by `gguf.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagemill.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_GPT_4_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_4_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordRule:
    """How text becomes words, and what else goes with it in the families that use it."""

    split: str | None = None  # a regular expression whose matches are words; None: GPT-2's own
    single_digits: bool = False  # every digit is a word, ahead of the split
    compose: bool = False  # the text is brought to Unicode NFC first
    whole_words: bool = False  # a word that is a token is taken as it is, past the merges
    adds_bos: bool = False  # what holds where the file does not say


_GPT_2 = WordRule()
_GPT_2_COMPOSED = WordRule(compose=True)
_GPT_2_DIGITS = WordRule(single_digits=True)
_LLAMA_3 = WordRule(_GPT_4_HEAD + r"|\p{N}{1,3}" + _GPT_4_TAIL, whole_words=True, adds_bos=True)

WORD_RULES: dict[str, WordRule] = {
    "dbrx": WordRule(_LLAMA_3.split),
    "default": _GPT_2,
    "falcon3": _LLAMA_3,
    "gpt-2": _GPT_2,
    "lfm2": _LLAMA_3,
    "llama-bpe": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama3": _LLAMA_3,
    "mpt": _GPT_2_COMPOSED,
    "olmo": _GPT_2_COMPOSED,
    "phi-2": _GPT_2,
    "qwen2": WordRule(_GPT_4_HEAD + r"|\p{N}" + _GPT_4_TAIL, compose=True),
    "refact": _GPT_2_DIGITS,
    "smollm": _GPT_2_DIGITS,
    "starcoder": _GPT_2_DIGITS,
    "tekken": WordRule(_TEKKEN, whole_words=True, adds_bos=True),
}


def build_byte_level(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    rule: WordRule,
    *,
    prefix_space: bool = False,
) -> Backend:
    """Return a tokenizer whose ids are the places in `tokens`; added tokens are the caller's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(
            vocab=vocabulary, merges=list(merges), fuse_unk=False, ignore_merges=rule.whole_words
        )
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"the merges do not fit the vocabulary: {error}") from error
    backend: Backend = Tokenizer(model)
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=rule.split is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend
