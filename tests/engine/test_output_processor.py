"""Text, stops, logprobs, samples and kinds of output, as a caller sees them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.llm_engine import LLMEngine
from pagemill.outputs import CompletionOutput, RequestOutput
from pagemill.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.harness import engine_config, generate, make_engine, run, says
from tests.fakes.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, ByteTokenizer


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | fields))


def one(engine: LLMEngine, **fields: Any) -> CompletionOutput:
    return generate(engine, "p", greedy(**fields)).outputs[0]


def stream(engine: LLMEngine, **fields: Any) -> list[CompletionOutput]:
    engine.add_request("s", "p", greedy(output_kind=RequestOutputKind.DELTA, **fields))
    return [o.outputs[0] for o in run(engine)]


# ------------------------------------------------------------ stop strings


def test_a_stop_across_token_borders_cuts_the_text_before_it() -> None:
    out = one(make_engine(says("ABCDEFGHIJK"))[0], stop=["DEFGHIJ"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("ABC", "stop", "DEFGHIJ")
    assert out.token_ids == [*b"ABCDEFGHIJ"]  # up to the token that completed it


def test_a_stream_never_sends_a_piece_of_what_becomes_the_stop() -> None:
    deltas = [d.text for d in stream(make_engine(says("ABCDEFGHIJK"))[0], stop=["DEFGHIJ"])]
    assert deltas == ["A", "B", "C", "", "", "", "", "", "", ""]


def test_held_text_is_released_as_soon_as_it_cannot_match() -> None:
    deltas = [d.text for d in stream(make_engine(says("ABCDEFxyz"))[0], stop=["DEFGHIJ"])]
    assert deltas[:8] == ["A", "B", "C", "", "", "", "DEFx", "y"]
    assert "".join(deltas) == "ABCDEFxyz"


def test_text_held_at_the_end_is_not_lost() -> None:
    deltas = stream(make_engine(says("ABCDEF"))[0], stop=["DEFGHIJ"])
    assert "".join(d.text for d in deltas) == "ABCDEF"
    assert deltas[-1].finish_reason == "stop"


def test_a_stop_string_may_stand_at_the_very_start() -> None:
    out = one(make_engine(says("STOP and more"))[0], stop=["STOP"])
    assert out.text == ""
    assert out.token_ids == [*b"STOP"]


def test_the_stop_string_is_kept_when_asked_for() -> None:
    out = one(make_engine(says("ABCD"))[0], stop=["BC"], include_stop_str_in_output=True)
    assert (out.text, out.stop_reason) == ("ABC", "BC")


def test_a_string_stop_wins_over_length_on_the_same_token() -> None:
    out = one(make_engine(says("ABCD"))[0], stop=["C"], max_tokens=3)
    assert (out.text, out.finish_reason, out.stop_reason) == ("AB", "stop", "C")


def test_stop_strings_and_the_end_token_both_work() -> None:
    assert one(make_engine(says("one two"))[0], stop=["three"]).stop_reason is None
    assert one(make_engine(says("one three"))[0], stop=["three"]).stop_reason == "three"


def test_stop_strings_count_only_behind_min_tokens() -> None:
    script = says("a\n" + "b" * 20 + "\nrest")
    out = one(make_engine(script)[0], stop=["\n"], min_tokens=20)
    assert out.text == "a\n" + "b" * 20
    assert out.stop_reason == "\n"


def test_a_hidden_special_token_stops_as_a_string() -> None:
    script = says([*b"hi", IM_END_ID, *b"no", EOS_ID])
    out = one(make_engine(script)[0], stop=["<|im_end|>"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("hi", "stop", "<|im_end|>")
    assert out.token_ids == [*b"hi", IM_END_ID]


def test_a_stop_across_a_hidden_special_token_matches() -> None:
    script = says([*b"hi", IM_END_ID, *b"\nno", EOS_ID])
    out = one(make_engine(script)[0], stop=["i<|im_end|>\n"])
    assert (out.text, out.stop_reason) == ("h", "i<|im_end|>\n")


def test_a_hidden_special_token_does_not_show_and_does_not_end_the_text() -> None:
    out = one(make_engine(says([*b"a", BOS_ID, *b"b", EOS_ID]))[0])
    assert out.text == "ab"
    assert one(make_engine(says([*b"a", BOS_ID, *b"b", EOS_ID]))[0], skip_special_tokens=False).text == (
        "a<bos>b"
    )  # fmt: skip


def test_the_end_string_named_as_a_stop_is_reported() -> None:
    out = one(make_engine(says("hi"))[0], stop=["<eos>"])
    assert (out.text, out.stop_reason) == ("hi", "<eos>")


# ------------------------------------------------------------ token stops


def test_a_stop_token_adds_no_text_and_stays_in_the_ids() -> None:
    out = one(make_engine(says("ab;cd"))[0], stop_token_ids=[ord(";")])
    assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", ord(";"))
    assert out.token_ids == [*b"ab;"]


def test_a_stop_token_shows_its_text_when_asked_for() -> None:
    script = says("ab;cd")
    stops = {"stop_token_ids": [ord(";")], "include_stop_str_in_output": True}
    assert one(make_engine(script)[0], **stops).text == "ab;"


def test_the_caller_s_own_id_is_reported_as_an_id() -> None:
    script = says([*b"hi", IM_END_ID])
    out = one(make_engine(script)[0], stop=["<|im_end|>"], stop_token_ids=[IM_END_ID])
    assert out.stop_reason == IM_END_ID


def test_every_end_token_of_the_model_ends_the_text() -> None:
    config = engine_config(eos_token_ids=(EOS_ID, IM_END_ID))
    for end in (EOS_ID, IM_END_ID):
        engine, _ = make_engine(says([*b"ok", end]), config=config)
        assert one(engine).text == "ok"


def test_ignore_eos_goes_past_every_end_token() -> None:
    config = engine_config(eos_token_ids=(EOS_ID, IM_END_ID))
    engine, _ = make_engine(says([EOS_ID, *b"a", IM_END_ID, *b"b"] * 20), config=config)
    out = one(engine, ignore_eos=True, max_tokens=50)
    assert (len(out.token_ids), out.finish_reason) == (50, "length")


def test_a_stop_as_the_very_first_token_with_logprobs_leaves_lists_of_equal_length() -> None:
    out = one(make_engine(says(""))[0], logprobs=2)
    assert (out.text, out.token_ids) == ("", [EOS_ID])
    assert out.logprobs is not None
    assert len(out.logprobs) == 1


# ------------------------------------------------------------ characters


def test_no_delta_splits_a_character() -> None:
    text = "é🎉 中a\u0301 end"
    deltas = stream(make_engine(says(text))[0])
    assert "".join(d.text for d in deltas) == text
    assert not any("\ufffd" in d.text for d in deltas)


def test_broken_bytes_show_as_in_a_full_decode_and_nothing_after_is_lost() -> None:
    tokens = [*b"a", 0xF0, 0x9F, *b" ok  two", 0xC3, EOS_ID]
    out = one(make_engine(says(tokens))[0])
    assert out.text == ByteTokenizer().decode(tokens)
    assert out.text.startswith("a\ufffd ok  two")


def test_ids_without_text_when_detokenize_is_off() -> None:
    out = one(make_engine(says("abc"))[0], detokenize=False)
    assert (out.text, out.token_ids) == ("", [*b"abc", EOS_ID])


def test_padding_rows_of_the_vocabulary_stand_for_no_text() -> None:
    out = one(make_engine(says([*b"a", 259, *b"b", EOS_ID]))[0], logprobs=0)
    assert out.text == "ab"
    assert out.logprobs is not None
    assert out.logprobs[1][259].decoded_token is None


# ------------------------------------------------------------ logprobs


def test_the_chosen_token_is_always_among_the_logprobs() -> None:
    out = one(make_engine(says("A\x01"))[0], logprobs=3)
    assert out.logprobs is not None
    assert list(out.logprobs[0]) == [0, 1, 2, ord("A")]  # three, and the chosen one
    assert list(out.logprobs[1]) == [0, 1, 2]  # the chosen one is the second best
    assert [entry.rank for entry in out.logprobs[0].values()] == [1, 2, 3, ord("A") + 1]
    assert out.logprobs[0][ord("A")].decoded_token == "A"
    values = [entry.logprob for entry in out.logprobs[0].values()]
    assert values == sorted(values, reverse=True)
    assert out.cumulative_logprob == pytest.approx(-(65 + 1 + EOS_ID) / 1000)


def test_no_logprobs_unless_asked_for() -> None:
    out = one(make_engine(says("ab"))[0])
    assert (out.logprobs, out.cumulative_logprob) == (None, None)


def test_prompt_logprobs_have_one_entry_a_token_and_the_first_is_none() -> None:
    config = engine_config(max_num_batched_tokens=4)  # over three chunks
    engine, _ = make_engine(says("x"), config=config)
    output = generate(engine, "123456789", greedy(prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry or {})[-1] for entry in output.prompt_logprobs[1:]] == [*b"23456789"]


def test_prompt_logprobs_alone_generate_nothing() -> None:
    engine, _ = make_engine(says("x"))
    output = generate(engine, "12345", greedy(prompt_logprobs=0, max_tokens=0))
    assert len(output.prompt_logprobs or []) == 5
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")


# ------------------------------------------------------------ samples


def _sample_script(prompt: tuple[int, ...], sample: int) -> list[int]:
    """Samples 0..4 say one token each; lower ids are likelier."""
    return [b"ecadb"[sample], EOS_ID]


def test_best_of_returns_the_n_best_first_under_new_indices() -> None:
    engine, _ = make_engine(_sample_script)
    outputs = generate(engine, "p", SamplingParams(n=2, best_of=5, max_tokens=4)).outputs
    assert [(o.index, o.text) for o in outputs] == [(0, "a"), (1, "b")]
    assert outputs[0].cumulative_logprob is None  # tracked, not asked for


def test_best_of_streams_are_one_final_output() -> None:
    engine, _ = make_engine(_sample_script)
    params = SamplingParams(n=2, best_of=5, max_tokens=4, output_kind=RequestOutputKind.DELTA)
    engine.add_request("x", "p", params)
    outputs = run(engine)
    assert len(outputs) == 1
    assert [o.text for o in outputs[0].outputs] == ["a", "b"]


def test_cumulative_outputs_hold_every_sample_so_far() -> None:
    engine, _ = make_engine(lambda prompt, sample: [*("ab" * (sample + 1)).encode(), EOS_ID])
    engine.add_request("x", "p", SamplingParams(n=3, max_tokens=9))
    outputs = run(engine)
    assert all([o.index for o in output.outputs] == [0, 1, 2] for output in outputs)
    assert [o.text for o in outputs[-1].outputs] == ["ab", "abab", "ababab"]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_an_output_does_not_change_after_it_was_handed_out() -> None:
    engine, _ = make_engine(says("abcdef"))
    engine.add_request("x", "p", greedy(logprobs=1))
    outputs = run(engine)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(o.outputs[0].logprobs or []) for o in outputs] == [1, 2, 3, 4, 5, 6, 7]
    assert outputs[0].metrics is not outputs[1].metrics


def test_final_only_gives_one_output() -> None:
    engine, _ = make_engine(says("abc"))
    engine.add_request("x", "p", greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = run(engine)
    assert [o.outputs[0].text for o in outputs] == ["abc"]


def test_the_seed_a_sample_was_drawn_with_is_reported() -> None:
    engine, _ = make_engine(says("a"))
    assert one(engine, temperature=1.0, seed=7).seed == 7
    assert one(engine, temperature=1.0).seed is not None


def test_an_abort_gives_out_the_held_text() -> None:
    engine, _ = make_engine(says("ABCDEF"))
    engine.add_request("x", "p", greedy(stop=["CDEFG"]))
    for _ in range(4):
        engine.step()
    (output,) = engine.abort_request("x")
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ABCD", "abort")


def test_an_abort_in_the_prefill_ends_every_sample() -> None:
    engine, _ = make_engine(says("A"))
    engine.add_request("x", "p" * 9, SamplingParams(n=4))
    (output,) = engine.abort_request("x")
    assert [o.finish_reason for o in output.outputs] == ["abort"] * 4


def _joined(outputs: list[RequestOutput], n: int) -> list[tuple[str, list[int], int]]:
    texts, ids, logprobs = [""] * n, [[] for _ in range(n)], [0] * n  # type: ignore[var-annotated]
    for output in outputs:
        for sample in output.outputs:
            texts[sample.index] += sample.text
            ids[sample.index] += sample.token_ids
            logprobs[sample.index] += len(sample.logprobs or [])
            assert len(sample.logprobs or []) == len(sample.token_ids)
    return list(zip(texts, ids, logprobs, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    said=st.lists(
        st.lists(st.sampled_from([*b"abc \n", 0xC3, 0xA9, 0xF0, IM_END_ID, EOS_ID]), max_size=14),
        min_size=1,
        max_size=3,
    ),
    stop=st.lists(st.sampled_from(["ab", "b c", "\n", "a<|im_end|>", "cab", "é"]), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 16),
)
def test_joined_deltas_equal_the_final_output(
    said: list[list[int]], stop: list[str], include: bool, min_tokens: int, max_tokens: int
) -> None:
    n = len(said)
    results = []
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        engine, _ = make_engine(lambda prompt, sample: said[sample])
        params = SamplingParams(
            n=n, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens,
            max_tokens=max_tokens, logprobs=0, output_kind=kind,
        )  # fmt: skip
        engine.add_request("x", "p", params)
        results.append(run(engine))
    deltas, (final,) = results
    assert _joined(deltas, n) == _joined([final], n)
    ends = {o.index: (o.finish_reason, o.stop_reason) for d in deltas for o in d.outputs}
    assert ends == {o.index: (o.finish_reason, o.stop_reason) for o in final.outputs}
