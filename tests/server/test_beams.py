"""Beam search over HTTP: which fields mean what, and the same beams as offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from pagemill import LLM, BeamSearchParams
from pagemill.server.errors import ApiError
from pagemill.server.protocol import read_chat, read_completion
from tests.server.harness import Running
from tests.server.real_serve import Serve

BODY = {"prompt": "x", "use_beam_search": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True}


def test_best_of_is_the_width_and_n_what_comes_back() -> None:
    read = read_completion(
        {**BODY, "n": 2, "best_of": 5, "length_penalty": 0.5}, {"temperature": 0.7}
    )
    assert read.beams == BeamSearchParams(
        beam_width=5, n=2, max_tokens=16, length_penalty=0.5, logprobs=0
    )
    assert read.params.n == 2
    chat = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 3}
    wide = read_chat({**chat, "max_completion_tokens": 7, "early_stopping": "never"}, {}).beams
    assert wide == BeamSearchParams(
        beam_width=3, n=3, max_tokens=7, early_stopping="never", logprobs=0
    )
    ends = {"stop": ["a"], "stop_token_ids": [7], "include_stop_str_in_output": True}
    read = read_completion({**BODY, "n": 2, "logprobs": 3, **ends}, {})
    assert read.beams == BeamSearchParams(
        beam_width=2,
        n=2,
        logprobs=3,
        stop=["a"],
        stop_token_ids=[7],
        include_stop_str_in_output=True,
    )
    assert read.params.logprobs == 3
    asks = {**chat, "logprobs": True, "top_logprobs": 2}
    beams = read_chat(asks, {}).beams
    assert beams is not None and beams.logprobs == 2
    assert read_completion({**BODY, "use_beam_search": False}, {}).beams is None
    plain = {"prompt": "x", "length_penalty": 1.0, "early_stopping": False}
    assert read_completion(plain, {}).beams is None
    assert read_completion({**BODY, "top_p": 1, "seed": 4, "logprobs": 0}, {}).beams is not None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"logprobs": -3}, "logprobs"),
        ({"logprobs": 3, "echo": True}, "echo"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 300}, "n"),
        ({"n": 2, "best_of": 1}, "n"),
        ({"best_of": 300}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"length_penalty": -500}, "length_penalty"),
        ({"length_penalty": 2, "use_beam_search": False}, "length_penalty"),
        ({"early_stopping": 3}, "early_stopping"),
    ],
)
def test_what_beams_cannot_have_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion({**BODY, **fields}, {})
    assert caught.value.param == named
    assert "beam_width" not in caught.value.message
    if named in ("n", "best_of"):
        assert caught.value.message.startswith(f"{named} is ")


def test_whole_numbers_may_be_written_with_a_point() -> None:
    fields = {"n": 2.0, "best_of": 4.0, "max_tokens": 5.0, "stop_token_ids": [3.0]}
    read = read_completion({**BODY, **fields}, {})
    assert read.beams == BeamSearchParams(
        beam_width=4, n=2, max_tokens=5, stop_token_ids=[3], logprobs=0
    )
    for wrong in (2.5, "2", True):
        with pytest.raises(ApiError, match="^n is "):
            read_completion({**BODY, "n": wrong}, {})


def test_a_width_that_the_vocabulary_cannot_give_is_named_as_the_body_names_it(
    server: Running,
) -> None:
    for path, more in (("completions", BODY), ("chat/completions", CHAT)):
        for given in ({"n": 200}, {"best_of": 200}):
            answer = server.post(f"/v1/{path}", {**more, **given})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == next(iter(given))
            assert error["message"].startswith(f"{error['param']} is 200; with the 260 tokens")


def test_a_field_of_chat_has_its_own_name_in_errors() -> None:
    for fields, named in (
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
    ):
        with pytest.raises(ApiError, match=f"^{named} is ") as caught:
            read_chat({**CHAT, **fields}, {})
        assert caught.value.param == named


def test_the_official_client_gets_the_beams_of_offline_search(
    tiny_llama: Path, serve: Serve
) -> None:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt=[5, 9, 33], max_tokens=6, n=2, best_of=4,
            extra_body={"use_beam_search": True, "return_token_ids": True},
        )  # fmt: skip
    with LLM(str(tiny_llama)) as llm:
        params = BeamSearchParams(beam_width=4, n=2, max_tokens=6)
        (output,) = llm.beam_search([[5, 9, 33]], params)
    ours = [choice.model_extra["token_ids"] for choice in answer.choices]
    assert ours == [sequence.tokens[3:] for sequence in output.sequences]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == sum(map(len, ours))


def test_beams_over_http_have_logprobs_and_end_at_stops(serve: Serve) -> None:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client:

        def beams(**fields: Any) -> list[Any]:
            return client.completions.create(
                model="tiny", prompt="hello", max_tokens=8, n=2, logprobs=3,
                extra_body={"use_beam_search": True, "return_token_ids": True, **fields},
            ).choices  # fmt: skip

        free = beams()
        for choice in free:
            assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens) == 8
            # Three alternatives, and the beam's own token where it is none of them; of tokens that are
            # broken characters alone one stands for all.
            assert all(1 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)
        token = free[0].model_extra["token_ids"][3]
        stopped = beams(stop_token_ids=[token])
        assert any(choice.model_extra["stop_reason"] == token for choice in stopped)
        for choice in stopped:
            assert token not in choice.model_extra["token_ids"][:-1]
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, n=2,
            logprobs=True, top_logprobs=2, extra_body={"use_beam_search": True},
        )  # fmt: skip
        for one in chat.choices:
            assert one.logprobs is not None and one.logprobs.content is not None
            assert [len(entry.top_logprobs) for entry in one.logprobs.content] == [2] * 4
