"""What a request may say, and what is refused before anything is queued."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pagemill.engine.input_processor import InputProcessor, LengthRule
from pagemill.engine.vocabulary import bad_word_ids
from pagemill.errors import NotSupportedError, PromptTooLongError, RequestError
from pagemill.messages import EngineRequest, ServiceTerms
from pagemill.sampling_params import SamplingParams
from tests.engine.harness import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    assert_clean,
    engine_config,
    generate,
    make_engine,
    model_config,
    says,
)
from tests.fakes.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, ByteTokenizer


def processor(*, adds_bos: bool = False, **model: Any) -> InputProcessor:
    config = engine_config(**model)
    return InputProcessor(config.model, config.scheduler, ByteTokenizer(adds_bos=adds_bos))


def process(prompt: Any = "p", rule: LengthRule = LengthRule.CLAMP, **fields: Any) -> EngineRequest:
    return processor().process("x", prompt, SamplingParams(**fields), length_rule=rule)


# ------------------------------------------------------------ prompts


def test_every_form_of_a_prompt_gives_the_same_tokens() -> None:
    forms: list[Any] = [
        "hi",
        [104, 105],
        (104, 105),
        {"prompt": "hi"},
        {"prompt_token_ids": [104, 105]},
    ]
    assert {process(form).prompt_token_ids for form in forms} == {(104, 105)}
    both = process({"prompt": "hi", "prompt_token_ids": [1, 2]})
    assert (both.prompt, both.prompt_token_ids) == ("hi", (1, 2))


@pytest.mark.parametrize(
    "prompt",
    [None, 7, 1.5, b"hi", {}, {"text": "hi"}, {"prompt": 7}, {"prompt": "a", "other": 1},
     ["a"], [1, "a"], [True], [1.0], [[1]], {"prompt_token_ids": "hi"}, {"prompt_token_ids": [None]}],
)  # fmt: skip
def test_other_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        process(prompt)
    assert caught.value.param in ("prompt", "prompt_token_ids")


@pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds"])
def test_what_later_features_read_is_refused_by_name(key: str) -> None:
    with pytest.raises(NotSupportedError, match=key):
        process({"prompt": "hi", key: {"image": 1}})


def test_cache_salt_becomes_a_labelled_key() -> None:
    assert process({"prompt": "hi", "cache_salt": "mine"}).cache_keys == (("cache_salt", "mine"),)
    assert process({"prompt": "hi", "cache_salt": None}).cache_keys == ()


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_cache_salt_that_is_no_text_is_refused(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt") as caught:
        process({"prompt": "hi", "cache_salt": salt})
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**70])
def test_prompt_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"{token}; .* 0 to {VOCAB_SIZE - 1}"):
        process([1, token])


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_the_begin_token_where_one_is_added(prompt: Any) -> None:
    made = processor(adds_bos=True).process("x", prompt, SamplingParams())
    assert made.prompt_token_ids == (BOS_ID,)
    with pytest.raises(RequestError, match="empty") as caught:
        process(prompt)
    assert caught.value.param == "prompt"


def test_a_prompt_over_the_limit_is_refused_with_both_numbers() -> None:
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 9):
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens.* {MAX_MODEL_LEN} tokens"):
            process([1] * length)


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_the_last_place_of_the_context_gives_one_token(max_tokens: int | None) -> None:
    engine, _ = make_engine(says("abc"))
    out = generate(engine, [1] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=max_tokens))
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("a", "length")


def test_the_strict_rule_names_all_three_numbers() -> None:
    for max_tokens in (None, 1):
        made = process([1] * (MAX_MODEL_LEN - 1), LengthRule.STRICT, max_tokens=max_tokens)
        assert made.max_tokens == 1
    with pytest.raises(
        PromptTooLongError, match=r"63 tokens and max_tokens is 2, .* 64 tokens"
    ) as e:
        process([1] * (MAX_MODEL_LEN - 1), LengthRule.STRICT, max_tokens=2)
    assert e.value.param == "max_tokens"


def test_the_strict_rule_refuses_min_tokens_that_the_context_cannot_hold() -> None:
    wanted = r"min_tokens is 5, but the prompt has 60 tokens and the context is 64 tokens.* 4 "
    with pytest.raises(PromptTooLongError, match=wanted) as e:
        process([1] * (MAX_MODEL_LEN - 4), LengthRule.STRICT, max_tokens=None, min_tokens=5)
    assert e.value.param == "min_tokens"
    made = process([1] * (MAX_MODEL_LEN - 4), LengthRule.CLAMP, max_tokens=None, min_tokens=5)
    assert made.max_tokens == 4


def test_a_full_context_is_enough_when_nothing_is_generated() -> None:
    made = process([1] * MAX_MODEL_LEN, LengthRule.STRICT, max_tokens=0, prompt_logprobs=1)
    assert made.max_tokens == 0


def test_truncation_keeps_the_last_tokens_and_is_reported() -> None:
    made = process("0123456789", truncate_prompt_tokens=3)
    assert (made.prompt_token_ids, made.num_truncated_prompt_tokens) == (tuple(b"789"), 7)
    assert process("01", truncate_prompt_tokens=3).num_truncated_prompt_tokens == 0


def test_truncation_to_the_limit_leaves_room_for_the_answer() -> None:
    made = process([1] * 100, LengthRule.STRICT, truncate_prompt_tokens=-1, max_tokens=10)
    assert (len(made.prompt_token_ids), made.num_truncated_prompt_tokens) == (54, 46)


# ------------------------------------------------------------ ids and masks


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_and_the_neighbour_goes_on(
    name: str, token: int
) -> None:
    engine, _ = make_engine(says("neighbour"))
    engine.add_request("n", "p", SamplingParams(temperature=0.0))
    bad = SamplingParams(min_tokens=1, **{name: {token: 1.0} if name == "logit_bias" else [token]})
    with pytest.raises(RequestError, match=f"{name} .*{token}") as caught:
        engine.add_request("b", "p", bad)
    assert caught.value.param == name
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].text == "neighbour"
    assert_clean(engine)


def test_every_end_is_in_the_mask_of_min_tokens() -> None:
    inputs = processor(eos_token_ids=(EOS_ID, 5))
    params = SamplingParams(min_tokens=2, stop_token_ids=[9], stop=["<|im_end|>"])
    made = inputs.process("x", "p", params)
    assert made.sampling.stop_token_ids == (5, 9, EOS_ID, IM_END_ID)
    assert made.eos_token_ids == {EOS_ID, 5}
    ignoring = inputs.process("x", "p", SamplingParams(ignore_eos=True, stop_token_ids=[9]))
    assert (ignoring.sampling.stop_token_ids, ignoring.eos_token_ids) == ((9,), frozenset())


class WordTokenizer(ByteTokenizer):
    """Says "bad" in three tokens and " bad" in one; puts a space before every text if told to."""

    def __init__(self, puts_space: bool) -> None:
        super().__init__(adds_bos=True)
        self._puts_space = puts_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS_ID] if add_special_tokens else []
        text = f" {text}" if self._puts_space else text
        while text:
            if text.startswith(" bad"):
                ids.append(200)
                text = text[4:]
            else:
                ids.append(ord(text[0]))
                text = text[1:]
        return ids


@pytest.mark.parametrize("word", ["bad", " bad"])
@pytest.mark.parametrize("puts_space", [False, True])
def test_both_forms_of_a_bad_word_are_banned_whatever_their_lengths(
    word: str, puts_space: bool
) -> None:
    forms = bad_word_ids([word], WordTokenizer(puts_space))
    assert {(200,), tuple(b"bad")} <= set(forms)
    assert not any(BOS_ID in form for form in forms)


def test_allowed_tokens_that_are_all_bad_words_are_refused() -> None:
    with pytest.raises(RequestError, match="bad_words bans every one") as caught:
        process(allowed_token_ids=[97, 98], bad_words=["a", "b"])
    assert caught.value.param == "allowed_token_ids"
    assert process(allowed_token_ids=[97, 98], bad_words=["a"]).sampling.allowed_token_ids == (
        97,
        98,
    )


def test_min_tokens_with_nothing_but_ends_allowed_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 1"):
        process(allowed_token_ids=[EOS_ID], min_tokens=1)
    assert process(allowed_token_ids=[EOS_ID]).sampling.min_tokens == 0


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_allowed_are_refused(name: str) -> None:
    for value in (21, -1):
        with pytest.raises(RequestError, match=rf"{name} is {value}.* 0 to 20") as caught:
            process(**{name: value})
        assert caught.value.param == name
    unlimited = processor(max_logprobs=-1).process("x", "p", SamplingParams(**{name: -1}))
    assert getattr(unlimited.sampling, name) == -1


def test_best_of_tracks_logprobs_without_showing_them() -> None:
    made = process(n=1, best_of=3)
    assert (made.sampling.logprobs, made.params.logprobs, made.num_samples) == (0, None, 3)
    raw = processor(logprobs_mode="raw_logits")
    with pytest.raises(RequestError, match="best_of"):
        raw.process("x", "p", SamplingParams(n=1, best_of=3))


# ------------------------------------------------------------ lengths, seeds, copies


def test_max_tokens_is_settled() -> None:
    assert process("0123", max_tokens=None).max_tokens == MAX_MODEL_LEN - 4
    assert process("0123", max_tokens=7).max_tokens == 7
    assert process("0123", max_tokens=10**9).max_tokens == MAX_MODEL_LEN - 4


@pytest.mark.parametrize(("fields", "longest"), [
    ({"max_tokens": 1}, MAX_MODEL_LEN - 1), ({"max_tokens": None}, MAX_MODEL_LEN - 1),
    ({"max_tokens": 0, "prompt_logprobs": 1}, MAX_MODEL_LEN),
])  # fmt: skip
def test_a_prompt_over_the_context_is_told_the_longest_that_fits(
    fields: dict[str, Any], longest: int
) -> None:
    process("a" * longest, **fields)
    with pytest.raises(PromptTooLongError, match=rf"{longest + 1} tokens.* at most {longest} "):
        process("a" * (longest + 1), **fields)


def test_token_ids_of_numpy_are_token_ids() -> None:
    made = process(list(np.array([65, 66])))
    assert repr(made.prompt_token_ids) == "(65, 66)"


def test_seeds_of_unseeded_requests_repeat_with_the_engine_s_seed_and_differ_from_each_other() -> (
    None
):
    def seeds(engine_seed: int | None) -> list[int]:
        inputs = processor(seed=engine_seed)
        return [inputs.process("x", "p", SamplingParams()).sampling.seed for _ in range(20)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1), *seeds(None)}) == 60
    assert processor().process("x", "p", SamplingParams(seed=5)).sampling.seed == 5


def test_the_engine_works_on_its_own_copy() -> None:
    params = SamplingParams(stop=["x"], stop_token_ids=[1])
    made = processor().process("x", "p", params)
    params.stop_token_ids = [999]
    params.stop.append("y")  # type: ignore[union-attr]
    assert (made.params.stop, made.params.stop_token_ids) == (["x"], [1])


def test_a_field_set_after_construction_is_checked_again() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(RequestError, match="top_p is 7"):
        processor().process("x", "p", params)


def test_the_model_s_defaults_hold_without_parameters() -> None:
    inputs = processor(generation_config={"temperature": 0.5, "top_k": 9})
    made = inputs.process("x", "p", None)
    assert (made.sampling.temperature, made.sampling.top_k) == (0.5, 9)


@pytest.mark.parametrize("priority", [3, True, "high"])
def test_a_priority_is_refused_where_arrival_decides(priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        processor().process("x", "p", SamplingParams(), terms=ServiceTerms(priority=priority))


@pytest.mark.parametrize("seconds", [0, -1, -0.5, math.nan, math.inf, True, "5"])
@pytest.mark.parametrize("name", ["start_timeout", "request_timeout"])
def test_a_timeout_is_a_number_of_seconds(name: str, seconds: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is .* greater than 0") as caught:
        processor().process("x", "p", SamplingParams(), terms=ServiceTerms(**{name: seconds}))
    assert caught.value.param == name


@pytest.mark.parametrize("moment", [math.nan, math.inf, -1, 10**400, 1e300, True, "now", [0.0]])
def test_a_time_of_arrival_is_a_moment_that_has_come(moment: Any) -> None:
    """By it the policy priority says whose turn it is, which must come."""
    with pytest.raises(RequestError, match=r"arrival_time is .* a moment in seconds") as caught:
        processor().process("r", "abc", arrival_time=moment)
    assert caught.value.param == "arrival_time"


@pytest.mark.parametrize("moment", [0, 0.5, 1e9])
def test_a_time_of_arrival_that_was_is_taken(moment: float) -> None:
    assert processor().process("r", "abc", arrival_time=moment).arrival_time == moment


def test_timeouts_become_moments_and_none_means_no_deadline() -> None:
    made = processor().process("x", "p", None, terms=ServiceTerms(request_timeout=5, tenant="a"))
    assert made.deadlines is not None
    assert made.deadlines.end_by == made.deadlines.since + 5
    assert (made.deadlines.start_by, made.tenant) == (None, "a")
    assert processor().process("x", "p", None).deadlines is None


def test_a_tenant_is_a_string() -> None:
    terms = ServiceTerms(tenant=7)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tenant is 7"):
        processor().process("x", "p", SamplingParams(), terms=terms)


@pytest.mark.parametrize("request_id", ["", None, 7])
def test_a_request_id_is_a_non_empty_string(request_id: Any) -> None:
    with pytest.raises(RequestError, match="request_id"):
        processor().process(request_id, "p", SamplingParams())


def test_other_parameters_than_sampling_params_are_refused() -> None:
    with pytest.raises(RequestError, match="dict"):
        processor().process("x", "p", {"temperature": 1})  # type: ignore[arg-type]


def test_without_a_tokenizer_only_ids_go_in_and_out() -> None:
    config = engine_config(skip_tokenizer_init=True)
    inputs = InputProcessor(model_config(), config.scheduler, None)
    assert not inputs.process("x", [1, 2], SamplingParams()).params.detokenize
    for prompt, params in (("text", {}), ([1], {"stop": ["a"]}), ([1], {"bad_words": ["a"]})):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            inputs.process("x", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    engine, _ = make_engine(says("abc"), config=config)
    out = generate(engine, [1, 2]).outputs[0]
    assert (out.text, out.token_ids) == ("", [*b"abc", EOS_ID])
