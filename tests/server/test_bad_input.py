"""Hostile bodies over every endpoint, streamed and not: 400 naming the field, and a plain request answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.harness import VOCAB_SIZE, Running, running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "say:a"},
    CHAT: {"messages": [{"role": "user", "content": "say:a"}]},
}

# (field, raw JSON): refused at both endpoints, naming the field.
EVERYWHERE = [
    ("temperature", "NaN"), ("temperature", "1e400"), ("temperature", '"hot"'),
    ("temperature", "[1]"), ("temperature", "-0.1"), ("temperature", "-1e400"),
    ("temperature", "true"), ("temperature", "{}"),
    ("top_p", "0"), ("top_p", "1.5"), ("top_p", "NaN"), ("top_p", '"x"'),
    ("top_k", "-2"), ("top_k", "1.5"), ("top_k", "1e400"), ("min_p", "2"), ("min_p", "NaN"),
    ("n", "0"), ("n", "-1"), ("n", "16385"), ("n", "1.5"), ("n", '"2"'), ("n", "1e400"),
    ("best_of", "0"), ("best_of", '"x"'),
    ("seed", "1e400"), ("seed", '"x"'), ("seed", "9223372036854775808"),
    ("presence_penalty", "3"), ("frequency_penalty", "-3"), ("frequency_penalty", "NaN"),
    ("repetition_penalty", "0"), ("repetition_penalty", "-1"), ("repetition_penalty", "1e400"),
    ("stop", '""'), ("stop", '[""]'), ("stop", "[1]"), ("stop", "5"), ("stop", "{}"),
    ("stop_token_ids", "[-1]"), ("stop_token_ids", f"[{VOCAB_SIZE}]"),
    ("stop_token_ids", '["a"]'), ("stop_token_ids", "7"), ("stop_token_ids", "[1.5]"),
    ("bad_words", '[""]'), ("bad_words", "[1]"), ("bad_words", '"x"'),
    ("max_tokens", "-1"), ("max_tokens", '"x"'), ("max_tokens", "1.5"), ("max_tokens", "0"),
    ("max_tokens", "1e400"), ("min_tokens", "-1"), ("min_tokens", "17.5"),
    ("prompt_logprobs", "-2"), ("prompt_logprobs", "true"), ("prompt_logprobs", "21"),
    ("truncate_prompt_tokens", "0"), ("truncate_prompt_tokens", "-2"),
    ("logit_bias", '{"x": 1}'), ("logit_bias", "[1]"), ("logit_bias", '{"1": "a"}'),
    ("logit_bias", '{"1": NaN}'), ("logit_bias", f'{{"{VOCAB_SIZE}": 1}}'),
    ("logit_bias", '{"-1": 1}'), ("logit_bias", '{"1_0": 1}'), ("logit_bias", '{"1": 1, "01": 1}'),
    ("logit_bias", '{"1": 1e400}'), ("max_tokens", "9" * 4300), ("top_k", "-" + "9" * 4300),
    ("min_tokens", "9" * 4300), ("stop_token_ids", f"[{'9' * 4300}]"),
    ("allowed_token_ids", "[]"), ("allowed_token_ids", "[-1]"), ("allowed_token_ids", '["x"]'),
    ("include_stop_str_in_output", "1"), ("ignore_eos", '"yes"'), ("skip_special_tokens", "0"),
    ("stream", '"yes"'), ("stream", "1"), ("model", "5"), ("priority", '"high"'),
    ("priority", "1"), ("priority", "1.5"), ("priority", "true"), ("user", "7"),
    ("start_timeout", "-1"), ("start_timeout", "0"), ("start_timeout", '"5"'),
    ("request_timeout", "-0.5"), ("request_timeout", "NaN"), ("request_timeout", "1e400"),
    ("request_timeout", "true"), ("request_timeout", "1" + "0" * 400),
    ("start_timeout", "1e10"),
    ("extra_args", '{"a": 1}'), ("extra_args", "5"),
    ("tempreature", "1"), ("mystery", "null"),
    # features of other servers or later versions
    ("response_format", '{"type": "json_object"}'), ("structured_outputs", '{"json": {}}'),
    ("guided_json", "{}"), ("logits_processors", '["a:b"]'), ("use_beam_search", "1"),
    ("length_penalty", "2"), ("early_stopping", "true"),
    ("cache_salt", "1"), ("cache_salt", '""'), ("output_kind", "1"),
]  # fmt: skip
COMPLETIONS_ONLY = [
    ("prompt", "null"), ("prompt", "5"), ("prompt", "[1.5]"), ("prompt", '[1, "a"]'),
    ("prompt", "[[1], 2]"), ("prompt", "{}"), ("prompt", "[true]"), ("prompt", "[-1]"),
    ("prompt", f"[{VOCAB_SIZE}]"), ("prompt", '""'), ("prompt", "[]"), ("prompt", "[[]]"),
    ("prompt", '"\\ud800"'), ("logprobs", "true"), ("logprobs", "-2"), ("logprobs", "21"),
    ("logprobs", '"x"'), ("echo", "1"), ("suffix", '"x"'), ("messages", "[]"),
    ("prompt_embeds", '"x"'), ("add_special_tokens", "1"),
]  # fmt: skip
CHAT_ONLY = [
    ("messages", "null"), ("messages", "[]"), ("messages", '"x"'), ("messages", "[1]"),
    ("messages[0].role", '[{"content": "x"}]'), ("messages[0].role", '[{"role": 5}]'),
    ("messages[0].content", '[{"role": "user"}]'),
    ("messages[0].content", '[{"role": "user", "content": 5}]'),
    ("messages[0].content[0]", '[{"role": "user", "content": [1]}]'),
    ("messages[0].content[0].type",
     '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'),
    ("messages[0].content[0].text", '[{"role": "user", "content": [{"type": "text"}]}]'),
    ("logprobs", "1"), ("top_logprobs", "1.5"), ("top_logprobs", "1"),
    ("tools", '[{"type": "function"}]'), ("tools", '"x"'), ("tool_choice", '"required"'),
    ("functions", '[{"name": "f"}]'), ("modalities", '["audio"]'), ("audio", "{}"),
    ("reasoning_effort", '"low"'), ("echo", "true"), ("prompt", '"x"'),
    ("chat_template", "5"), ("chat_template_kwargs", "5"),
    ("chat_template_kwargs", '{"messages": []}'), ("continue_final_message", "1"),
    ("max_completion_tokens", "-1"), ("max_completion_tokens", '"x"'), ("documents", "5"),
]  # fmt: skip
STREAM_ONLY = [
    ("stream_options", "5"), ("stream_options.include_usage", '{"include_usage": 1}'),
    ("stream_options.include_usgae", '{"include_usgae": true}'),
    ("stream_options.include_obfuscation", '{"include_obfuscation": true}'),
    ("prompt_logprobs", "1"), ("best_of", "2"),
]  # fmt: skip

CASES = [
    *((path, stream, *case) for path in BASES for stream in (False, True) for case in EVERYWHERE),
    *((COMPLETIONS, stream, *case) for stream in (False, True) for case in COMPLETIONS_ONLY),
    *((CHAT, stream, *case) for stream in (False, True) for case in CHAT_ONLY),
    *((path, True, *case) for path in BASES for case in STREAM_ONLY),
]


def send(server: Running, path: str, raw: str | bytes, **headers: str) -> httpx.Response:
    content = raw.encode() if isinstance(raw, str) else raw
    kind = {"content-type": "application/json"} | headers
    return server.http.post(path, content=content, headers=kind)


def assert_still_answers(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "say:fine"})
    assert answer.json()["choices"][0]["text"] == "fine"


def assert_error(response: httpx.Response, status: int, param: str | None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    if param is not None:
        assert param.rsplit(".", 1)[-1].split("[")[0] in body["error"]["message"]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(server: Running) -> Any:
    yield
    server.wait_idle()


def test_every_hostile_value_is_a_400_that_names_its_field(server: Running) -> None:
    for path, stream, param, raw in CASES:
        fields = {name: json.dumps(value) for name, value in BASES[path].items()}
        fields["stream"] = json.dumps(stream)
        fields[param.split(".")[0].split("[")[0]] = raw
        body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
        response = send(server, path, body)
        if response.status_code != 400:
            pytest.fail(f"{path} {body}: {response.status_code} {response.text[:300]}")
        try:
            assert_error(response, 400, param)
        except AssertionError as error:
            pytest.fail(f"{path} {body}: {error}")
        assert_still_answers(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        "", "{", "[]", '"x"', "null", "5", '{"prompt": }', "{'prompt': 'x'}", '{"a": 1} x', "NaN",
        "[" * 100_000, '{"a":' * 100_000, '{"prompt": ' + "9" * 5000 + "}", b"\xff\xfe{", b"\x00",
        # a half character outside an escape, as a value, a name and a list's item; other encodings
        b'{"prompt": "\xed\xa0\x80"}', b'{"\xed\xa0\x80": 1}', b'{"stop": ["\xed\xbf\xbf"]}',
        '{"prompt": "x"}'.encode("utf-16"), '{"prompt": "\\ud800"}'.encode("utf-16-le"),
        '{"prompt": "x"}'.encode("utf-32"),
    ],
    ids=range(21),
)  # fmt: skip
def test_what_is_no_json_object_is_a_400(server: Running, path: str, raw: str | bytes) -> None:
    assert_error(send(server, path, raw), 400, None)
    assert_still_answers(server)


def test_a_byte_order_mark_before_utf_8_is_no_harm(server: Running) -> None:
    assert send(server, COMPLETIONS, b'\xef\xbb\xbf{"prompt": "say:a"}').status_code == 200


@pytest.mark.parametrize("text", ['"x"', '"\\u0041"'])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_of_any_depth_is_a_400(
    server: Running, text: str, opening: str, closing: str
) -> None:
    """Python's own limit is met at different depths by reading, checking, showing and writing."""
    wheres = (
        (COMPLETIONS, '{"prompt": %s}'), (COMPLETIONS, '{"prompt": "x", "stop": %s}'),
        (CHAT, '{"messages": %s}'), (CHAT, '{"messages": [{"role": "user", "content": %s}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}], "tool_choice": %s}'),
        ("/detokenize", '{"tokens": %s}'),
    )  # fmt: skip
    for depth in (100, 300, 330, 480, 940, 960, 980, 990, 1000):
        nested = opening * depth + text + closing * depth
        for path, body in wheres:
            response = send(server, path, body % nested)
            assert response.status_code == 400, (path, body, depth, response.text)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "image/png"])
def test_other_content_types_are_a_400(server: Running, kind: str) -> None:
    response = send(server, COMPLETIONS, '{"prompt": "x"}', **{"content-type": kind})
    assert_error(response, 400, None)
    assert kind in response.json()["error"]["message"]


def test_json_without_a_content_type_or_with_a_charset_is_read(server: Running) -> None:
    raw = b'{"prompt": "say:a"}'
    assert server.http.post(COMPLETIONS, content=raw).status_code == 200
    kind = "application/json; charset=utf-8"
    assert send(server, COMPLETIONS, raw, **{"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_tokenizing_routes_check_their_fields(
    server: Running, path: str, body: Any, param: str
) -> None:
    assert_error(server.post(path, body), 400, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_unknown_model_is_a_404(server: Running, path: str) -> None:
    body = {**BASES.get(path, {"prompt": "x"}), "model": "gpt-9"}
    if path == "/detokenize":
        body = {"tokens": [1], "model": "gpt-9"}
    response = server.post(path, body)
    assert_error(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"
    assert "gpt-9" in response.text


def test_unknown_path_is_a_404_and_wrong_method_a_405_in_the_same_shape(server: Running) -> None:
    assert_error(server.get("/v1/nothing"), 404, None)
    assert_error(server.post("/v1/completions/", {"prompt": "x"}), 404, None)
    response = server.get(COMPLETIONS)
    assert_error(response, 405, None)
    assert response.headers["allow"] == "POST"
    assert_error(server.post("/health", {}), 405, None)


def test_body_over_the_limit_is_a_413() -> None:
    from pagemill.server.settings import ServerArgs

    with running_server(ServerArgs(max_body_bytes=1000)) as server:
        assert_error(server.post(COMPLETIONS, {"prompt": "x" * 1000}), 413, None)
        # Without a length in the headers the body is counted as it comes.
        parts = (b"x" * 100 for _ in range(20))
        response = server.http.post(COMPLETIONS, content=parts)
        assert_error(response, 413, None)
        assert_still_answers(server)


def test_empty_prompts_are_the_begin_token_where_the_tokenizer_adds_one() -> None:
    with running_server(adds_bos=True) as server:
        for prompt in ("", [], [[]]):
            body = {"prompt": prompt, "max_tokens": 2, "return_token_ids": True}
            choice = server.post(COMPLETIONS, body).json()["choices"][0]
            assert choice["prompt_token_ids"] == [256]
            assert choice["text"] == ".."


def test_text_without_a_tokenizer_is_a_400_and_ids_work() -> None:
    with running_server(skip_tokenizer_init=True) as server:
        assert_error(server.post(COMPLETIONS, {"prompt": "x"}), 400, "prompt")
        assert_error(server.post("/tokenize", {"prompt": "x"}), 400, "prompt")
        body = {"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
        choice = server.post(COMPLETIONS, body).json()["choices"][0]
        assert choice["token_ids"] == [46, 46]
        assert choice["logprobs"]["tokens"] == ["token_id:46", "token_id:46"]
