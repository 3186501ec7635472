"""What the engine needs of a tokenizer. Implementations and their choice: `pagemill.tokenizer`.

No torch here. A tokenizer belongs to one model (or, later, to one adapter); both are looked up through
`load_tokenizer(path)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that one or more tokens became. Hidden pieces are special tokens left out of the text."""

    text: str
    hidden: bool = False


class IncrementalDecoder(Protocol):
    """Turns tokens into text as they come.

    For every split of a token sequence, the joined visible pieces of all `push` calls and the last
    `flush` equal `Tokenizer.decode` of the whole, and no piece ends inside a character.
    """

    def push(self, token_id: int) -> Sequence[TextPiece]:
        """Take one token and return the text that is now certain; it may be empty."""
        ...

    def flush(self) -> Sequence[TextPiece]:
        """Return what was held back; broken bytes become U+FFFD. The decoder is spent."""
        ...

    def copy(self) -> IncrementalDecoder:
        """Return another decoder that has taken the same tokens: texts may go on differently."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the highest token id (added tokens included)."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool:
        """Return whether `encode` puts the begin token first."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Return the Jinja2 source of the default chat template."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Return the ids that `skip_special_tokens` leaves out of the text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. A text that begins with the begin token gets no second one."""
        ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `token_ids`. Ids outside the vocabulary raise ValueError."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return one token's own text, for logprobs: specials by name, broken bytes as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's own bytes (a leading-space marker as a space), exact."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry by its exact spelling."""
        ...

    def decoder(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """Return a fresh incremental decoder."""
        ...

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
        """Return the rendered text. A template's own complaint raises RequestError with its words."""
        ...
