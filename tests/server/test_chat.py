"""/v1/chat/completions through the official client: layouts, streams, templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import MAX_MODEL_LEN, MODEL, Running, running_server

PATH = "/v1/chat/completions"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def create(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = user(text)
    return client.chat.completions.create(
        model=MODEL, messages=messages, **({"temperature": 0} | fields)
    )


def test_plain_answer(client: openai.OpenAI) -> None:
    answer = create(client, "say:hello")
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "hello")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == len("hello") + 1


def test_default_length_is_what_the_context_leaves(client: openai.OpenAI) -> None:
    answer = create(client, "dots")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client: openai.OpenAI, name: str) -> None:
    answer = create(client, "dots", **{name: 3})
    assert answer.choices[0].message.content == "..."


def test_stream_begins_with_the_role_and_ends_with_the_reason(client: openai.OpenAI) -> None:
    chunks = list(create(client, "say:héllo", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "héllo"
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" for c in chunks)


def test_every_choice_of_every_chunk_has_the_key_finish_reason(server: Running) -> None:
    chunks = server.chunks(PATH, {"messages": user("say:{i}"), "n": 3})
    roles = [c["choices"][0] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(choice["index"] for choice in roles) == [0, 1, 2]
    assert all("finish_reason" in choice for c in chunks for choice in c["choices"])
    ended = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]


def test_three_samples(client: openai.OpenAI) -> None:
    answer = create(client, "say:{i}", n=3, temperature=1)
    assert [c.message.content for c in answer.choices] == ["0", "1", "2"]
    assert answer.usage.completion_tokens == 3 * 2
    once = create(client, "say:{i}", temperature=1)
    assert answer.usage.prompt_tokens == once.usage.prompt_tokens


def test_streamed_usage_with_two_samples_counts_the_prompt_once(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": user("say:{i}"), "n": 2, "stream_options": options}
    chunks = server.chunks(PATH, body)
    whole = server.post(PATH, {"messages": user("say:{i}"), "n": 2}).json()["usage"]
    assert chunks[-1]["usage"] == whole
    assert chunks[-1]["choices"] == []
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {whole["prompt_tokens"]}


def test_logprobs_have_the_chat_layout(client: openai.OpenAI) -> None:
    answer = create(client, "say:hé", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [c.token for c in content] == ["h", "\ufffd", "\ufffd", "<eos>"]
    assert b"".join(bytes(c.bytes) for c in content) == "hé<eos>".encode()
    assert content[0].logprob == -0.104
    assert [t.token for t in content[0].top_logprobs] == ["\x00", "\x01"]
    assert content[0].top_logprobs[1].bytes == [1]


def test_logprobs_without_top_logprobs_have_empty_top_lists(client: openai.OpenAI) -> None:
    content = create(client, "say:ab", logprobs=True).choices[0].logprobs.content
    assert [(c.token, c.top_logprobs) for c in content] == [("a", []), ("b", []), ("<eos>", [])]


def test_streamed_logprobs_join_to_the_unstreamed_ones(client: openai.OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 1}
    whole = create(client, "say:héy", **fields).choices[0].logprobs.content
    joined = []
    for chunk in create(client, "say:héy", stream=True, **fields):
        if chunk.choices[0].logprobs is not None:
            joined += chunk.choices[0].logprobs.content
    assert [c.model_dump() for c in joined] == [c.model_dump() for c in whole]


def test_top_logprobs_without_logprobs_is_refused(server: Running) -> None:
    answer = server.post(PATH, {"messages": user("x"), "top_logprobs": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_too_many_top_logprobs_name_the_field_of_this_body(server: Running) -> None:
    body = {"messages": user("x"), "logprobs": True, "top_logprobs": 21}
    answer = server.post(PATH, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_two_different_limits_are_refused(server: Running) -> None:
    body = {"messages": user("x"), "max_tokens": 1, "max_completion_tokens": 2}
    answer = server.post(PATH, body)
    assert answer.json()["error"]["param"] == "max_completion_tokens"


def test_wrong_limit_is_named_as_the_client_spelled_it(server: Running) -> None:
    body = {"messages": user("x"), "max_completion_tokens": -1}
    assert server.post(PATH, body).json()["error"]["param"] == "max_completion_tokens"


def test_final_message_is_continued(server: Running) -> None:
    messages = [*user("x"), {"role": "assistant", "content": "say:more"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert server.post(PATH, body).json()["choices"][0]["message"]["content"] == "more"
    clash = server.post(PATH, {**body, "add_generation_prompt": True})
    assert clash.json()["error"]["param"] == "continue_final_message"


def test_one_text_through_chat_completions_and_tokenize_gives_the_same_ids(server: Running) -> None:
    messages = user("say:x")
    chat = server.post(PATH, {"messages": messages, "return_token_ids": True}).json()
    tokens = server.post("/tokenize", {"messages": messages}).json()
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    plain = server.post(
        "/v1/completions",
        {"prompt": text, "return_token_ids": True, "add_special_tokens": False},
    ).json()
    assert chat["prompt_token_ids"] == tokens["tokens"]
    assert plain["choices"][0]["prompt_token_ids"] == tokens["tokens"]
    assert tokens["count"] == len(tokens["tokens"])


@pytest.fixture(scope="module")
def templated() -> Iterator[Running]:
    """A server whose tokenizer renders real templates."""
    from tests.server.template_tokenizer import TemplateTokenizer

    with running_server() as running:
        running.engine._tokenizer = TemplateTokenizer()
        yield running


def test_template_s_own_complaint_is_a_400_with_its_words(templated: Running) -> None:
    messages = [{"role": "system", "content": "be brief"}, *user("x")]
    answer = templated.post(PATH, {"messages": messages})
    assert answer.status_code == 400
    assert "System role not supported" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


def test_template_of_the_body_and_its_variables_are_used(templated: Running) -> None:
    body = {
        "messages": user("x"),
        "chat_template": "say:{{ word }}{{ documents[0]['t'] }}",
        "chat_template_kwargs": {"word": "hi"},
        "documents": [{"t": "!"}],
    }
    answer = templated.post(PATH, body).json()
    assert answer["choices"][0]["message"]["content"] == "hi!"


def test_broken_template_of_the_body_is_a_400(templated: Running) -> None:
    answer = templated.post(PATH, {"messages": user("x"), "chat_template": "{% if %}"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_template_that_prints_the_begin_token_gives_one_not_two(templated: Running) -> None:
    body = {"messages": user("x"), "chat_template": "<bos>say:a", "return_token_ids": True}
    for add in (False, True):
        answer = templated.post(PATH, {**body, "add_special_tokens": add}).json()
        assert answer["prompt_token_ids"].count(256) == 1


def test_text_parts_are_read_and_tools_shown_with_tool_choice_none(templated: Running) -> None:
    parts = [{"type": "text", "text": "say:"}, {"type": "text", "text": "part"}]
    template = "{% for p in messages[0]['content'] %}{{ p['text'] }}{% endfor %}"
    body = {"messages": [{"role": "user", "content": parts}], "chat_template": template}
    answer = templated.post(PATH, body).json()
    assert answer["choices"][0]["message"]["content"] == "part"
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {
        "messages": user("x"),
        "tools": tools,
        "tool_choice": "none",
        "chat_template": "say:{{ tools[0]['function']['name'] }}",
    }
    answer = templated.post(PATH, body).json()
    assert answer["choices"][0]["message"]["content"] == "look"
