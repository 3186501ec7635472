"""Chat templates: Jinja2 in a sandbox, with what Hugging Face templates use.

A template is a program that came with a model or with a request, so it runs in a sandbox with a budget
(`template_sandbox.py`). It sees `messages`, `tools`, `documents`, `add_generation_prompt`, the special
tokens by name (`bos_token`, …), `raise_exception`, `strftime_now`, the `tojson` filter, loop controls and
`{% generation %}` blocks. The format is that of the transformers library's `apply_chat_template`.

Whatever goes wrong while a template runs is the request's (or the template's) fault and raises
RequestError. Called by the tokenizers.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2

from pagemill.errors import RequestError
from pagemill.tokenizer.template_sandbox import TemplateSandbox

Message = dict[str, Any]


class _TemplateComplaint(jinja2.TemplateError):
    """What a template said through `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateComplaint(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> TemplateSandbox:
    environment = TemplateSandbox()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno})",
            param="chat_template",
        ) from error
    except Exception as error:
        # jinja2 evaluates constants while it compiles, and Python has limits of its own.
        words = str(error) or type(error).__name__
        raise RequestError(
            f"the chat template cannot be compiled: {words}", param="chat_template"
        ) from error


def render_chat(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation.

    `variables` are handed to the template by name (special tokens, `enable_thinking`, `documents`).
    With `continue_final_message` the text ends where the last message's content ends, so that the model
    goes on with it; the template's closing marks are cut off.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true, but the last message "
            "cannot be continued behind the start of a new one; set one of them to false",
            param="continue_final_message",
        )
    shaped = fit_contents(source, messages)
    given: dict[str, Any] = {"documents": None, **(variables or {})}
    given.update(tools=list(tools) if tools is not None else None)
    given.update(add_generation_prompt=add_generation_prompt)
    if continue_final_message:
        return _render_open_ended(source, shaped, given)
    return _render(source, shaped, given)


def _render(source: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    template = _compile(source)
    try:
        return TemplateSandbox.render(template, {**variables, "messages": list(messages)})
    except _TemplateComplaint as error:
        raise RequestError(f"the chat template says: {error.message}", param="messages") from error
    except Exception as error:
        # A template is foreign code: any exception it ends with is its verdict on this request.
        words = str(error) or type(error).__name__
        raise RequestError(
            f"the chat template failed on these messages: {words} ({type(error).__name__})",
            param="messages",
        ) from error


# --- going on with the last message --------------------------------------------------------------------

# Ends in a space: whether the template trimmed contents shows in whether the space survived.
_END_MARK = "PAGEMILL_END_OF_FINAL_MESSAGE "


def _render_open_ended(
    source: str, messages: Sequence[Message], variables: Mapping[str, Any]
) -> str:
    marked = [*messages[:-1], copy.deepcopy(messages[-1])]
    _append_to_text(marked[-1], _END_MARK)
    text = _render(source, marked, variables)
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise RequestError(
            "continue_final_message is true, but the chat template leaves out the end of the last "
            "message; continue a message that the template prints",
            param="continue_final_message",
        )
    spaced = text.startswith(_END_MARK, at)
    return text[:at] if spaced else text[:at].rstrip()


def _append_to_text(message: Message, mark: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + mark
        return
    for part in reversed(content) if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += mark
            return
    raise RequestError(
        "continue_final_message is true, but the last message has no text to go on with; give it a "
        "content that is a text",
        param="continue_final_message",
    )


# --- contents that are lists of parts ------------------------------------------------------------------


def fit_contents(source: str, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with lists of text parts joined, where the template knows only texts.

    Parts of other kinds raise RequestError there; a template that takes lists gets them as they are.
    """
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if not has_parts or takes_parts(source):
        return list(messages)
    return [_joined(message, index) for index, message in enumerate(messages)]


@functools.lru_cache(maxsize=64)
def takes_parts(source: str) -> bool:
    """Return whether a template understands a content that is a list of parts.

    Found by trying: a user message with one text part is rendered. A template that takes lists prints
    the text; others fail, leave it out, or print the list as Python spells it.
    """
    probe = "pagemill probes contents"
    message = {"role": "user", "content": [{"type": "text", "text": probe}]}
    try:
        text = _render(source, [message], {"add_generation_prompt": False, "bos_token": ""})
    except RequestError:
        return False
    return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text


def _joined(message: Message, index: int) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_texts(content, index))}


def _texts(parts: Iterable[Any], index: int) -> Iterable[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content has a part of type {kind!r}, but this model's chat template "
                "takes texts only; send parts of type 'text'",
                param="messages",
            )
