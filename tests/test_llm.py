"""`LLM` with a real (tiny) model: order, defaults, bad input, chat, metrics."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pagemill
from pagemill import LLM, BeamSearchParams, SamplingParams
from pagemill.errors import (
    CacheTooSmallError,
    EngineDeadError,
    NotSupportedError,
    PromptTooLongError,
    RequestError,
)
from pagemill.sampling_params import RequestOutputKind
from tests.fakes.fake_model import save_tiny_llama

ARGS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 20, "num_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), debug=True, **ARGS) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """After every test, whatever it did, nothing is queued and a plain request answers."""
    yield
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    gauges = {m.name: m.value for m in llm.get_metrics() if m.kind == "gauge"}
    assert gauges["pagemill:num_requests_running"] == 0
    assert gauges["pagemill:kv_cache_usage_perc"] == 0
    assert len(llm.generate("plain", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a" * n for n in (60, 3, 40, 1)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert all(o.finished for o in outputs)


def test_every_form_of_prompts_is_read(llm: LLM) -> None:
    forms: list[Any] = ["hi", ["hi"], [104, 105], [[104, 105]], {"prompt": "hi"}, list(np.array([104, 105])),
                        [{"prompt_token_ids": [104, 105]}], ("hi",)]  # fmt: skip
    answers = {llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms}
    assert len(answers) == 1


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate((), [], priority=[]) == []
    assert llm.generate([]) == []
    assert llm.chat([]) == []
    assert llm.beam_search([], BeamSearchParams(beam_width=2)) == []
    assert not llm.llm_engine.has_unfinished_requests()


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (2, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5, 3]


def test_the_kind_of_output_does_not_matter_here(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["ok", [999]], GREEDY, "999"),
        (["ok", ""], GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ("", GREEDY, "empty"),
        (["ok", "b" * 500], GREEDY, "500 tokens.*128 tokens"),
        (["a", "b"], [GREEDY], "1 entries for 2 prompts"),
        (["a", 7], GREEDY, "int"),
        (7, GREEDY, "int"),
        ("a", {"temperature": 1}, "sampling_params"),
        (["a", "b"], [GREEDY, SamplingParams(stop_token_ids=[-1])], "stop_token_ids"),
        (["a", "b"], [GREEDY, SamplingParams(logprobs=21)], "logprobs is 21"),
    ],
)
def test_one_bad_prompt_of_the_list_leaves_nothing_queued(
    llm: LLM, prompts: Any, params: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params, use_tqdm=False)


def test_bad_lists_of_priorities_are_refused(llm: LLM) -> None:
    for priority in ([1], [0, 1], [0, 10**400], [0, -(2**31) - 1]):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=priority)


def test_tenants_are_one_for_all_or_one_each(llm: LLM) -> None:
    for tenant in ("a", ["a", "b"]):
        outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False, tenant=tenant)
        assert len(outputs) == 2
    for tenant in (["a"], 5, [1, 2]):
        with pytest.raises(RequestError, match="tenant"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, tenant=tenant)  # type: ignore[arg-type]


def test_request_without_time_ends_with_the_reason(llm: LLM) -> None:
    (out,) = llm.generate("a", GREEDY, use_tqdm=False, request_timeout=1e-9)
    assert out.timed_out
    assert out.outputs[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="start_timeout is -1"):
        llm.generate("a", GREEDY, use_tqdm=False, start_timeout=-1)


def test_adapters_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="lora_request"):
        llm.generate("a", GREEDY, lora_request=object(), use_tqdm=False)  # type: ignore[arg-type]


def test_an_unknown_argument_names_the_nearest_known_one(folder: Path) -> None:
    with pytest.raises(TypeError, match="'max_model_length'.*'max_model_len'"):
        LLM(str(folder), max_model_length=5)
    with pytest.raises(NotSupportedError, match="enable_lora"):
        LLM(str(folder), enable_lora=True)


def test_a_length_that_does_not_fit_the_pool_says_what_fits(folder: Path) -> None:
    with pytest.raises(CacheTooSmallError, match=r"max_model_len.*\b48\b"):
        LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=30_000, num_threads=1)


def test_a_script_that_samples_says_the_same_each_time(folder: Path) -> None:
    def run(**fields: Any) -> list[tuple[str, int | None]]:
        with LLM(str(folder), **ARGS, **fields) as llm:
            outputs = llm.generate(["a", "a"], SamplingParams(max_tokens=12, n=2), use_tqdm=False)
            return [(sample.text, sample.seed) for o in outputs for sample in o.outputs]

    assert run() == run()
    assert run() != run(seed=1)
    assert len(set(run())) == 4  # equal prompts and samples of one prompt differ


def test_a_reported_seed_repeats_the_sample(llm: LLM) -> None:
    (first,) = llm.generate("once", SamplingParams(max_tokens=12), use_tqdm=False)
    seed = first.outputs[0].seed
    (again,) = llm.generate("once", SamplingParams(max_tokens=12, seed=seed), use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_the_model_s_sampling_defaults_hold_without_parameters(folder: Path) -> None:
    override = {"temperature": 0.0, "max_tokens": 3}
    with LLM(str(folder), override_generation_config=override, **ARGS) as llm:
        assert llm.get_default_sampling_params().temperature == 0.0
        (output,) = llm.generate("a", use_tqdm=False)
        assert output.outputs[0].token_ids == (
            llm.generate("a", SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )


def test_chat_renders_the_template_with_one_begin_token(llm: LLM) -> None:
    turn = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(turn, GREEDY, use_tqdm=False)
    assert output.prompt == "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids.count(256) == 1
    (same,) = llm.generate(output.prompt, GREEDY, use_tqdm=False)
    assert same.prompt_token_ids == output.prompt_token_ids
    assert same.outputs[0].text == output.outputs[0].text


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    turns = [[{"role": "user", "content": word}] for word in ("one", "two")]
    outputs = llm.chat(turns, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert [o.prompt for o in outputs] == ["one", "two"]


def test_a_chat_without_parameters_may_fill_the_context(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "stop" or length == 128


@pytest.mark.parametrize("messages", ["hi", None, [7], [[]], [{"role": "user", "content": "x"}, 7]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_the_template_s_own_complaint_is_passed_on(llm: LLM) -> None:
    template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(RequestError, match="no system role here"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template=template, use_tqdm=False)


def test_an_exception_without_words_breaks_its_own_request_alone(llm: LLM) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def broken(token_ids: list[int], logits: Any) -> Any:
        raise Mute

    params = [GREEDY, SamplingParams(max_tokens=4, logits_processors=[broken])]
    good, bad = llm.generate(["a", "b"], params, use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert (bad.error or "").endswith("Mute")


def test_a_raising_logits_processor_breaks_its_own_request_alone(llm: LLM) -> None:
    def broken(token_ids: list[int], logits: Any) -> Any:
        raise KeyError("broken")

    params = [GREEDY, SamplingParams(max_tokens=4, logits_processors=[broken])]
    good, bad = llm.generate(["a", "b"], params, use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert "broken" in (bad.error or "")


def test_a_bar_of_the_caller_s_own_is_filled(llm: LLM) -> None:
    class Bar:
        def __init__(self, **fields: Any) -> None:
            self.total, self.done, self.closed, self.postfix = fields["total"], 0, False, ""
            bars.append(self)

        def update(self, number: int) -> None:
            self.done += number

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    assert (bars[0].total, bars[0].done, bars[0].closed) == (3, 3, True)
    assert "toks/s" in bars[0].postfix


def test_the_bar_shows_rates(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "est. speed input" in shown


def test_ctrl_c_ends_cleanly_between_steps(llm: LLM) -> None:
    def press() -> None:
        while not llm.llm_engine.has_unfinished_requests():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            llm.generate(["a", "b"] * 20, long, use_tqdm=False)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_any_line_of_queueing_leaves_nothing(llm: LLM) -> None:
    engine = llm.llm_engine
    short = SamplingParams(temperature=0.0, max_tokens=1)
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        if frame.f_code.co_filename.startswith(str(Path(pagemill.__file__).parent / "core")):
            counted += event == "line"
            if counted == moment and event == "line":
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    for moment in range(1, 120):
        counted = 0
        with pytest.raises(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                llm.generate(["a", "b", "c"], short, use_tqdm=False)
            finally:
                sys.settrace(None)
        assert engine.get_num_unfinished_requests() == 0, moment
        assert len(llm.generate("a", short, use_tqdm=False)[0].outputs[0].token_ids) == 1


def test_metrics_count_what_was_done(folder: Path) -> None:
    with LLM(str(folder), **ARGS) as llm:
        llm.generate(["abc", "de"], GREEDY, use_tqdm=False)
        found = {m.name: m.value for m in llm.get_metrics()}
        assert found["pagemill:prompt_tokens"] == 5
        assert found["pagemill:generation_tokens"] == 16
    with LLM(str(folder), disable_log_stats=True, **ARGS) as llm:
        llm.generate("abc", GREEDY, use_tqdm=False)
        assert llm.get_metrics() == []


def test_a_shut_down_engine_says_so(folder: Path) -> None:
    llm = LLM(str(folder), **ARGS)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_the_worker_may_run_in_its_own_process(llm: LLM, folder: Path) -> None:
    prompts = ["one", "and another"]
    with LLM(str(folder), distributed_executor_backend="mp", **ARGS) as other:
        with pytest.raises(RequestError, match="logits_processors"):
            other.generate("a", SamplingParams(logits_processors=[print]), use_tqdm=False)
        theirs = other.generate(prompts, GREEDY, use_tqdm=False)
    ours = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]


def test_a_prompt_over_the_context_is_its_own_kind_of_error(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate("x" * 128, GREEDY, use_tqdm=False)


# ------------------------------------------------------------ stops with the real sampler

ENDS = {257: 100.0, 258: 100.0}


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose generation_config names two end tokens."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("ends"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    with LLM(str(folder), **ARGS) as made:
        yield made


def test_no_end_token_comes_before_min_tokens(two_ends: LLM) -> None:
    params = SamplingParams(min_tokens=10, max_tokens=40, logit_bias=ENDS)
    for output in two_ends.generate(["a", "b", "c"], params, use_tqdm=False):
        ids = output.outputs[0].token_ids
        assert len(ids) == 11
        assert not set(ids[:10]) & {257, 258}
        assert output.outputs[0].finish_reason == "stop"


def test_ignore_eos_goes_on_past_both_end_tokens(two_ends: LLM) -> None:
    params = SamplingParams(ignore_eos=True, max_tokens=50, logit_bias=ENDS)
    (output,) = two_ends.generate("a", params, use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert (len(ids), output.outputs[0].finish_reason) == (50, "length")
    assert set(ids) == {257, 258}


def test_a_stop_id_wins_over_nothing_before_min_tokens(two_ends: LLM) -> None:
    params = SamplingParams(stop_token_ids=[65], min_tokens=3, max_tokens=9, logit_bias={65: 100.0})
    (output,) = two_ends.generate("a", params, use_tqdm=False)
    assert output.outputs[0].token_ids.index(65) == 3
    assert output.outputs[0].stop_reason == 65


def test_banned_words_do_not_come_and_allowed_ids_alone_do(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=20, allowed_token_ids=[97, 98], bad_words=["aa", "bb"]
    )
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].text in ("ab" * 10, "ba" * 10)


def test_logits_that_are_not_finite_are_an_error_naming_the_dtype(
    tmp_path: Path, folder: Path
) -> None:
    made = save_tiny_llama(tmp_path)
    weights = load_file(str(made / "model.safetensors"))
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, str(made / "model.safetensors"), {"format": "pt"})
    with LLM(str(made), **ARGS) as broken:
        outputs = broken.generate(["a", "b"], SamplingParams(n=2), use_tqdm=False)
    for output in outputs:
        assert [o.finish_reason for o in output.outputs] == ["error", "error"]
        assert [o.token_ids for o in output.outputs] == [[], []]
        assert "float32" in (output.error or "")


def test_the_server_and_python_use_one_rendering(llm: LLM) -> None:
    """The rendered text gives the same ids through chat, generate and the tokenizer."""
    tokenizer = llm.get_tokenizer()
    (output,) = llm.chat([{"role": "user", "content": "é 🎉"}], GREEDY, use_tqdm=False)
    text = output.prompt or ""
    assert tokenizer.encode(text) == output.prompt_token_ids
    assert tokenizer.encode(text, add_special_tokens=False) == output.prompt_token_ids
