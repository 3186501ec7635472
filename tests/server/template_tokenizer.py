"""The byte tokenizer with real chat templates: a default one that refuses system messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.tokenizer.chat_template import render_chat
from tests.fakes.byte_tokenizer import ByteTokenizer

DEFAULT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


class TemplateTokenizer(ByteTokenizer):
    """Renders with `render_chat`."""

    def __init__(self) -> None:
        super().__init__(adds_bos=True)

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
        """Render the messages."""
        return render_chat(
            chat_template or DEFAULT_TEMPLATE,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
