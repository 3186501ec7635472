"""Random text of many scripts, spaces, digits, quotes and special names, for comparing tokenizers."""

from __future__ import annotations

import random
from collections.abc import Iterator

_BITS = [
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x00", "\x7f", "▁", "▁▁"),
    *("é", "e\u0301", "ß", "İ", "日本", "語", "नमस्ते", "한국어", "Привет", "العربية", "ไทย"),
    *("😀", "👩‍👩‍👧", "🇫🇷", "1", "123", "2024", "½", "٣", "'s", "'LL", "’s", "n't", "don't", "..."),
    *("the", " quick", "Brown", "fox", "_x", "(a)", "{}", "</b>", "http://a.b/c?d=e", "e=mc²"),
    *(
        "<bos>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<unused7>",
        "<start_of_turn>",
        "<0x41>",
        "[PAD]",
    ),
]
_RANGES = [(32, 127), (0xA0, 0x600), (0x600, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x1FFFF)]


def random_texts(source: random.Random, count: int) -> Iterator[str]:
    """Yield `count` texts of 1 to 40 bits: known ones, or characters of a random range."""
    for _ in range(count):
        yield "".join(
            source.choice(_BITS)
            if source.random() < 0.6
            else chr(source.randrange(*source.choice(_RANGES)))
            for _ in range(source.randrange(1, 40))
        )
