"""Whatever JSON a body holds, it becomes a checked request or an ApiError of the client's kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling_params import RequestOutputKind, SamplingParams
from pagemill.server.errors import ApiError
from pagemill.server.protocol import (
    NO_MEANING,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)

FIELDS = sorted(
    {f.name for f in dataclasses.fields(SamplingParams)}
    | {"prompt", "messages", "echo", "stream", "stream_options", "tools", "tool_choice", "model"}
    | {"use_beam_search", "length_penalty", "early_stopping"}
    | {"chat_template_kwargs", "documents", "priority", "top_logprobs", "max_completion_tokens"}
    | {"tokens", "add_special_tokens", "response_format", "user", "continue_final_message", "x"}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)
READERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (lambda data: read_completion(data, {}), {"prompt": "x"}),
    (lambda data: read_chat(data, {}), {"messages": [{"role": "user", "content": "x"}]}),
    (read_tokenize, {"prompt": "x"}),
    (read_detokenize, {"tokens": [1]}),
]


@pytest.mark.parametrize("reader", range(len(READERS)))
@settings(deadline=None, max_examples=300)
@given(body=BODIES, whole=st.booleans())
def test_any_body_is_read_or_refused_as_the_clients_fault(
    reader: int, body: dict[str, Any], whole: bool
) -> None:
    read, base = READERS[reader]
    try:
        read({**base, **body} if whole else body)
    except ApiError as error:
        assert 400 <= error.status < 500
        assert error.param is not None
        assert error.message


def test_a_number_without_a_fraction_is_whole_however_it_is_written() -> None:
    names = ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed", "logprobs")
    fields: dict[str, Any] = {name: 3 for name in names}
    fields |= {"truncate_prompt_tokens": 3, "prompt_logprobs": 5, "priority": 3, "echo": True}
    fields |= {"stop_token_ids": [3, 4], "allowed_token_ids": [5, 6], "prompt": [7, 8]}
    written = {
        name: [float(v) for v in value]
        if isinstance(value, list)
        else value
        if value is True
        else float(value)
        for name, value in fields.items()
    }
    assert read_completion(written, {}) == read_completion(fields, {})
    several = read_completion({"prompt": [[1.0, 2], [3.0]]}, {}).prompts
    assert several == [[1, 2], [3]] and all(type(i) is int for one in several for i in one)
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    for name in ("max_tokens", "max_completion_tokens", "top_logprobs"):
        assert read_chat({**chat, name: 4.0}, {}) == read_chat({**chat, name: 4}, {})
    assert read_detokenize({"tokens": [1.0, 2]}).tokens == [1, 2]
    for name in (*fields, "top_logprobs", "max_completion_tokens"):
        if name != "echo":
            with pytest.raises(ApiError, match=name):
                part = [1.5] if isinstance(fields.get(name), list) else 1.5
                read = read_chat if name.startswith(("top_l", "max_c")) else read_completion
                read({**(chat if read is read_chat else {"prompt": "x"}), name: part}, {})


def test_stream_chooses_the_kind_of_output() -> None:
    whole = read_completion({"prompt": "x"}, {})
    assert whole.params.output_kind is RequestOutputKind.FINAL_ONLY
    streamed = read_completion({"prompt": "x", "stream": True}, {})
    assert streamed.params.output_kind is RequestOutputKind.DELTA


def test_model_defaults_fill_absent_fields_and_null_ones_but_not_given_ones() -> None:
    defaults = {"temperature": 0.3, "top_k": 7, "max_tokens": 9}
    params = read_completion({"prompt": "x", "temperature": None, "top_k": 2}, defaults).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 2, 9)


@pytest.mark.parametrize("name", NO_MEANING)
def test_fields_without_meaning_are_accepted_whatever_they_hold(name: str) -> None:
    assert read_completion({"prompt": "x", name: {"any": ["thing"]}}, {}).prompts == ["x"]


def test_unknown_field_names_the_nearest_known_one() -> None:
    with pytest.raises(ApiError, match="did you mean 'temperature'"):
        read_completion({"prompt": "x", "temprature": 1}, {})


def test_echo_with_logprobs_asks_for_as_many_prompt_logprobs() -> None:
    base = {"prompt": "x", "echo": True, "logprobs": 3}
    assert read_completion(base, {}).params.prompt_logprobs == 3
    assert read_completion({**base, "prompt_logprobs": 5}, {}).params.prompt_logprobs == 5
    assert read_completion({**base, "prompt_logprobs": -1}, {}).params.prompt_logprobs == -1
