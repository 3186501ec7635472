"""Chat templates render as transformers renders them, and fail with words."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.errors import RequestError
from pagemill.tokenizer.chat_template import fit_contents, render_chat, takes_parts

USER = {"role": "user", "content": "  Hi <b> & 'you' é  "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "Again\n"},
    ],
    "tool call": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
            ],
        },
        {"role": "tool", "content": "3"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & more: é",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
EVERYTHING = """
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=2) }}
{%- endfor %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
    {% generation %}{% set inner = 'in' %}{{ inner }}{{ message.content | trim }}{% endgeneration %}
    {{ inner is defined }}
    {% else %}
{{ bos_token }}{{ message.content }}
    {% endif %}
{%- endfor %}
"""
OTHER = {"enable_thinking": False, "bos_token": "<s>", "documents": [{"title": "ü", "text": "<t>"}]}


def _reference(
    source: str, messages: list[dict[str, Any]], tools: Any = None, **settings: Any
) -> str:
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, **settings)
    return str(rendered[0])


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, EVERYTHING])
def test_rendering_equals_transformers(source: str, chat: str, prompt: bool, tools: Any) -> None:
    messages = CHATS[chat]
    expected = _reference(source, messages, tools, add_generation_prompt=prompt, **OTHER)
    found = render_chat(
        source, messages, tools=tools, add_generation_prompt=prompt, variables=OTHER
    )
    assert found == expected


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ("The answer is", CHATML),
        ("The answer is ", CHATML),
        ("The answer is  ", CHATML.replace("message['content']", "message['content'] | trim")),
        ("", CHATML),
    ],
)
def test_final_message_is_left_open_as_transformers_does(content: str, template: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    found = render_chat(
        template, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert found == _reference(template, messages, continue_final_message=True)
    assert messages[-1]["content"] == content


def test_final_message_cannot_be_continued_behind_a_generation_prompt() -> None:
    with pytest.raises(RequestError, match="continue_final_message and add_generation_prompt"):
        render_chat(CHATML, [USER], add_generation_prompt=True, continue_final_message=True)


def test_final_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="leaves out the end of the last message"):
        render_chat("x", [USER], add_generation_prompt=False, continue_final_message=True)


def test_a_templates_own_complaint_is_the_error() -> None:
    source = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(RequestError, match="System role not supported") as caught:
        render_chat(source, [USER])
    assert caught.value.param == "messages"


def test_now_is_formatted_as_asked() -> None:
    text = render_chat("{{ strftime_now('%Y') }}", [USER])
    assert text == datetime.datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("source", "words", "param"),
    [
        ("{% for x in %}", "not valid Jinja", "chat_template"),
        ("{% generation %}x", "not valid Jinja", "chat_template"),
        ("{{ nothing.at.all }}", "'nothing' is undefined", "messages"),
        ("{{ 'a' + messages }}", "TypeError", "messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError", "messages"),
        ("{% for x in range(10**9) %}{% endfor %}", "Range too big", "messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe", "messages"),
        ("{{ messages.append(1) }}", "unsafe", "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", "messages"),
    ],
)
def test_what_a_template_does_wrong_is_a_request_error(source: str, words: str, param: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render_chat(source, [USER])
    assert caught.value.param == param


def test_no_messages_is_an_error() -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        render_chat(CHATML, [])


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TAKES_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (TAKES_PARTS, True),
        (CHATML, False),  # fails on a list
        ("{{ messages[0].content | trim }}", False),  # prints the list
        ("{{ messages[0].content | tojson }}", False),  # prints the list
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", False),
    ],
)
def test_a_template_that_takes_parts_is_recognized(source: str, takes: bool) -> None:
    assert takes_parts(source) is takes


def test_text_parts_are_joined_for_a_template_that_knows_only_texts() -> None:
    messages = [{"role": "user", "content": PARTS}]
    assert "one\ntwo" in render_chat(CHATML, messages)
    assert render_chat(TAKES_PARTS, messages) == "[one][two]"
    assert messages[0]["content"] is PARTS


def test_other_parts_are_refused_where_the_template_knows_only_texts() -> None:
    messages = [{"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {}}]}]
    with pytest.raises(RequestError, match=r"messages\[0\].content has a part of type 'image_url'"):
        render_chat(CHATML, messages)
    assert fit_contents(TAKES_PARTS, messages) == messages
