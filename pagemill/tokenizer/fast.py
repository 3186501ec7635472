"""A tokenizer on top of the `tokenizers` library, whichever files it was made from.

It owns the rules that all sources share: one begin token and never two, exact decoding, the chat
template and its variables. `folder.py` and `gguf.py` make it; the engine and the server call it, from
several threads at once: nothing here changes after construction but caches of immutable values.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagemill.errors import RequestError
from pagemill.log import get_logger
from pagemill.tokenizer import chat_template as templates
from pagemill.tokenizer.base import IncrementalDecoder
from pagemill.tokenizer.decoding import WholePlan, plan_decoding
from pagemill.tokenizer.library_panics import decoding_walled, encoding_walled

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = get_logger(__name__)

# Characters, or ids, from which on the library's functions for batches are taken: they let Python's other
# threads run, and its functions for one text do not, for seconds in a text of megabytes.
LONG = 4096


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What the files beside a vocabulary say."""

    source: str  # where it came from, for messages
    # Special tokens by the names templates use: "bos_token" -> "<s>". Only those that exist.
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    # Named chat templates; the one without a name of its own is "default".
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class FastTokenizer:
    """Implements `pagemill.tokenizer.base.Tokenizer`.

    `decode` is the library's own. It does not do transformers' `clean_up_tokenization_spaces`, which
    removes spaces before punctuation: that is lossy for vocabularies that keep their spaces, and no
    incremental decoder could promise it. `spaces_between_special_tokens` has no effect on vocabularies of
    this kind, as in transformers: the tokens carry their own spaces.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings) -> None:
        # A length limit stored in tokenizer.json would cut or pad prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings = settings
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        section = backend.decoder
        self._plan = plan_decoding(
            None if section is None else json.loads(section.__getstate__()), self
        )
        if isinstance(self._plan, WholePlan):
            logger.warning(
                "the decoder of %s cannot work token by token; text appears when a request ends",
                settings.source,
            )
        self._bos_token_id = self._named_id("bos_token")
        self._eos_token_id = self._named_id("eos_token")
        start = backend.encode("").ids[:1]
        self._adds_bos = self._bos_token_id is not None and start == [self._bos_token_id]

    def _named_id(self, name: str) -> int | None:
        token = self._settings.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def backend(self) -> Backend:
        """Return the library's tokenizer, for what needs its vocabulary as a whole. Do not change it."""
        return self._backend

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def chat_template(self) -> str | None:
        return self._settings.chat_templates.get("default")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. A text that begins with the begin token gets no second one."""
        try:
            ids = self._ids(text, add_special_tokens)
        except TypeError as error:
            # The library's word for a str that is not UTF-8.
            raise _not_unicode(text) from error
        if (
            add_special_tokens
            and self._adds_bos
            and ids[1:2] == [self._bos_token_id]
            and ids[0] == self._bos_token_id
        ):
            return ids[1:]
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        backend = self._backend
        with encoding_walled():
            if len(text) <= LONG:
                encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
            ids: list[int] = encoding.ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `token_ids`. Ids outside the vocabulary raise ValueError."""
        if len(token_ids):
            self._check(min(token_ids))
            self._check(max(token_ids))
        return self.decode_whole(token_ids, skip_special_tokens)

    def decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode without a check of the ids: those without a token leave no trace."""
        ids = list(token_ids)
        text: str
        with decoding_walled(self._settings.source):
            if len(ids) <= LONG:
                text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            else:
                (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def decoder(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """Return a fresh incremental decoder.

        It takes ids that have no token (a model's embedding may be larger than its vocabulary) and gives
        no text for them.
        """
        return self._plan.decoder(skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token's own text; bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's own bytes; b"" for an id of a padded vocabulary that has no token."""
        return self._plan.token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry by its exact spelling."""
        with encoding_walled():
            token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def spelling(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None where the id has no token."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids begin at 0")
        with decoding_walled(self._settings.source):
            spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves the token out."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the rendered text.

        `chat_template` is the source of a template, or the name of one of the model's own.
        """
        return templates.render_chat(
            self._template_source(chat_template, with_tools=bool(tools)),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._settings.special_tokens, **variables},
        )

    def _template_source(self, wanted: str | None, *, with_tools: bool) -> str:
        known = self._settings.chat_templates
        if wanted is not None:
            return known.get(wanted, wanted)
        if with_tools and "tool_use" in known:
            return known["tool_use"]
        if "default" in known:
            return known["default"]
        named = f"; it has templates named {', '.join(sorted(known))}" if known else ""
        raise RequestError(
            f"the tokenizer of {self._settings.source} has no default chat template{named}: give one "
            "with --chat-template or the chat_template argument, or send a plain prompt to completions",
            param="messages",
        )

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}"
            )


def _not_unicode(text: str) -> RequestError:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RequestError(
            f"the prompt has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is no text; send valid Unicode",
            param="prompt",
        )
    return RequestError(f"the prompt cannot be tokenized: {type(text).__name__}", param="prompt")
