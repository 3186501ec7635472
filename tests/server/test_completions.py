"""/v1/completions through the official client: forms of prompts, echo, logprobs, streams, usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.byte_tokenizer import EOS_ID
from tests.server.harness import MAX_MODEL_LEN, MODEL, Running

PATH = "/v1/completions"


def create(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **({"max_tokens": 50, "temperature": 0} | fields)
    )


def test_plain_completion_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = create(client, "say:hello")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 6, 15)


def test_default_max_tokens_is_16(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].text == "." * 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("say:a", ["a"]),
        (["say:a", "say:b"], ["a", "b"]),
        (list(b"say:c"), ["c"]),
        ([list(b"say:d"), list(b"say:e")], ["d", "e"]),
    ],
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = create(client, prompt)
    assert [c.text for c in answer.choices] == texts
    assert [c.index for c in answer.choices] == list(range(len(texts)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = create(client, ["say:a{i}", "say:b{i}"], n=3, temperature=1)
    assert [(c.index, c.text) for c in answer.choices] == list(
        enumerate(["a0", "a1", "a2", "b0", "b1", "b2"])
    )
    # each prompt once; every choice's two letters and its end token
    assert answer.usage.prompt_tokens == 2 * len("say:a{i}")
    assert answer.usage.completion_tokens == 6 * 3


def test_streamed_choices_of_several_prompts_join_to_the_same_texts(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    for chunk in create(client, ["say:a{i}", "say:b{i}"], n=2, temperature=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_stop_string_cuts_the_text_and_is_the_reason(client: openai.OpenAI) -> None:
    answer = create(client, "say:one two three", stop=[" th", "zzz"])
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == " th"


def test_stream_sends_no_piece_of_a_stop_string(client: openai.OpenAI) -> None:
    chunks = list(create(client, "say:ABCDEFGHIJK", stop="DEFGHIJ", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "ABC"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_every_streamed_chunk_has_a_finish_reason_key_null_until_the_last(server: Running) -> None:
    chunks = server.chunks(PATH, {"prompt": "say:hello", "max_tokens": 9})
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


def test_characters_are_never_split_between_chunks(server: Running) -> None:
    text = "é🙂 ñ 漢字 👩‍👩‍👧"
    chunks = server.chunks(PATH, {"prompt": f"say:{text}", "max_tokens": 99})
    pieces = [c["choices"][0]["text"] for c in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_logprobs_have_the_completions_layout(client: openai.OpenAI) -> None:
    answer = create(client, "say:hé", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["h", "\ufffd", "\ufffd", "<eos>"]
    assert logprobs.token_logprobs == [-0.104, -0.195, -0.169, -0.257]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs[0] == {"\x00": 0.0, "\x01": -0.001, "h": -0.104}


def test_streamed_logprobs_join_to_the_unstreamed_ones(client: openai.OpenAI) -> None:
    whole = create(client, "say:héllo", logprobs=1).choices[0].logprobs
    joined: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for chunk in create(client, "say:héllo", logprobs=1, stream=True):
        if chunk.choices[0].logprobs is not None:
            for name, values in joined.items():
                values += getattr(chunk.choices[0].logprobs, name)
    assert joined == {name: getattr(whole, name) for name in joined}


def test_stop_as_the_very_first_token_gives_empty_text_and_lists_of_equal_length(
    client: openai.OpenAI,
) -> None:
    choice = create(client, "say:", logprobs=0).choices[0]
    assert choice.text == ""
    assert choice.logprobs.tokens == ["<eos>"]
    lengths = {len(v) for v in choice.logprobs.model_dump().values()}
    assert lengths == {1}


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    assert create(client, "say:yes", echo=True).choices[0].text == "say:yesyes"
    assert create(client, list(b"say:yes"), echo=True).choices[0].text == "say:yesyes"


def test_streamed_echo_comes_first_for_every_choice(client: openai.OpenAI) -> None:
    texts: dict[int, list[str]] = {}
    stream = create(client, "say:{i}", echo=True, stream=True, n=2, temperature=1)
    for chunk in stream:
        texts.setdefault(chunk.choices[0].index, []).append(chunk.choices[0].text)
    assert {index: "".join(pieces) for index, pieces in texts.items()} == {
        0: "say:{i}0",
        1: "say:{i}1",
    }
    assert all(pieces[0].startswith("say:{i}") for pieces in texts.values())


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_has_one_entry_a_prompt_token_the_first_null(
    server: Running, stream: bool
) -> None:
    body = {"prompt": "say:x", "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        chunks = server.chunks(PATH, body)
        logprobs = chunks[0]["choices"][0]["logprobs"]
    else:
        logprobs = server.post(PATH, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("say:xx")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.097, -0.121, -0.058, -0.12, -0.12]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_with_max_tokens_0_generates_nothing_and_counts_0(
    client: openai.OpenAI, logprobs: int | None
) -> None:
    answer = create(client, "abc", echo=True, max_tokens=0, logprobs=logprobs)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    if logprobs is not None:
        assert len(answer.choices[0].logprobs.tokens) == 3


def test_prompt_logprobs_are_null_then_one_object_a_token(server: Running) -> None:
    body = {"prompt": "ab", "prompt_logprobs": 1, "max_tokens": 1}
    entries = server.post(PATH, body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["98"] == {"logprob": -0.098, "rank": 99, "decoded_token": "b"}


def test_best_of_gives_the_best_first_and_counts_all(client: openai.OpenAI) -> None:
    # The scripted score of a token is -id/1000: '0' is likelier than '4'.
    answer = create(client, "say:{i}", n=2, best_of=5, temperature=1)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "0"), (1, "1")]
    assert answer.usage.completion_tokens == 5 * 2


def test_streamed_usage_comes_last_and_covers_all_choices(server: Running) -> None:
    body = {"prompt": "say:ab", "n": 2, "stream_options": {"include_usage": True}}
    chunks = server.chunks(PATH, body)
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 6
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_running_usage_only_when_asked_together_with_include_usage(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks(PATH, {"prompt": "say:ab", "stream_options": options})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    alone = {"continuous_usage_stats": True}
    chunks = server.chunks(PATH, {"prompt": "say:ab", "stream_options": alone})
    assert all("usage" not in c for c in chunks)


def test_token_ids_are_returned_on_request(server: Running) -> None:
    choice = server.post(PATH, {"prompt": "say:a", "return_token_ids": True}).json()["choices"][0]
    assert choice["token_ids"] == [ord("a"), EOS_ID]
    assert choice["prompt_token_ids"] == list(b"say:a")


def test_seed_of_an_unseeded_request_is_reported_and_can_be_given(server: Running) -> None:
    body = {"prompt": "say:a", "temperature": 1}
    seeds = {server.post(PATH, body).json()["choices"][0]["seed"] for _ in range(2)}
    assert len(seeds) == 2
    given = server.post(PATH, {**body, "seed": 5}).json()["choices"][0]["seed"]
    assert given == 5


def test_sampling_fields_beside_openai_s_are_honoured(server: Running) -> None:
    base = {"prompt": "say:abc", "max_tokens": 9}

    def text(**fields: Any) -> str:
        answer = server.post(PATH, {**base, **fields}).json()
        return str(answer["choices"][0]["text"])

    assert text(stop_token_ids=[ord("c")]) == "ab"
    assert text(stop="b", include_stop_str_in_output=True) == "ab"
    assert text(ignore_eos=True, skip_special_tokens=False) == "abc<eos>....."
    assert text(min_tokens=3, stop="b") == "abc"
    accepted = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "bad_words": ["z"]}
    more = {"logit_bias": {"5": 1}, "allowed_token_ids": [97, 98, 99], "top_p": 0.5}
    assert text(**accepted, **more) == "abc"


def test_truncation_is_opt_in_and_reported(server: Running) -> None:
    body = {"prompt": "xxxsay:a", "truncate_prompt_tokens": 5, "echo": True}
    answer = server.post(PATH, body).json()
    assert answer["choices"][0]["text"] == "say:aa"
    assert answer["usage"]["truncated_prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens"] == 5


def test_null_means_the_default(server: Running) -> None:
    nullable = (
        "n", "best_of", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "logprobs",
        "echo", "stream", "stream_options", "suffix", "logit_bias", "user", "presence_penalty",
        "frequency_penalty", "model", "min_tokens", "response_format", "priority",
    )  # fmt: skip
    body = {"prompt": "say:abcdefghijklmnopqrstuv"} | dict.fromkeys(nullable)
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "abcdefghijklmnop"


def test_fields_without_meaning_here_are_accepted(server: Running) -> None:
    body = {"prompt": "say:a", "user": "me", "metadata": {"a": "b"}, "store": False}
    assert server.post(PATH, body).status_code == 200


def test_prompt_and_max_tokens_over_the_context_is_400_with_three_numbers(server: Running) -> None:
    body = {"prompt": "x" * (MAX_MODEL_LEN - 1), "max_tokens": 2}
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(str(n) in message for n in (MAX_MODEL_LEN - 1, 2, MAX_MODEL_LEN))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    one = server.post(PATH, {**body, "max_tokens": 1})
    assert one.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_limit_is_400_with_both_numbers(server: Running, stream: bool) -> None:
    body = {"prompt": "x" * 600, "max_tokens": 1, "stream": stream}
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert "600" in answer.text and str(MAX_MODEL_LEN) in answer.text


def test_one_bad_prompt_of_several_queues_none(server: Running) -> None:
    before = len(server.executor.steps)
    answer = server.post(PATH, {"prompt": ["say:a", "x" * 600]})
    assert answer.status_code == 400
    assert len(server.executor.steps) == before
