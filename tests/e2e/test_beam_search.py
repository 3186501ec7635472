"""Beam search: the beams of transformers, and the same ones whatever the company and the pool."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from pagemill import LLM, BeamSearchParams, SamplingParams, native
from pagemill.errors import RequestError
from tests.models.tiny import TINY, save_tiny

PROMPTS = [[5, 9, 33, 7], [17, 17, 3, 90, 41, 8, 22, 60, 11], [100], list(range(20, 53))]
Told = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beams") / "llama"
    save_tiny(TINY["llama"], made)
    return made


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a tokenizer: up to four letters of a, b and c, and single other letters."""
    made = tmp_path_factory.mktemp("beams") / "spelled"
    save_tiny(TINY["llama"], made)
    words = ["".join(w) for n in range(1, 5) for w in itertools.product("abc", repeat=n)]
    vocab = ["<pad>", "<s>", "</s>", *words, *"defghijklmnopqrstuvwxyzABCDE"]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(made)
    return made


def start(folder: Path, **arguments: Any) -> LLM:
    settled = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, "num_threads": 1,
        "kv_cache_memory_bytes": 1 << 23, "debug": True,
    }  # fmt: skip
    return LLM(str(folder), **{**settled, **arguments})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


def told(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Told]:
    """Return tokens and log probability of each beam, by prompt."""
    outputs = llm.beam_search(prompts, params)
    return [
        [(s.tokens[len(prompt) :], s.cum_logprob) for s in output.sequences]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def assert_same(found: list[Told], expected: list[Told]) -> None:
    """Compare to the bit; without the native kernels, which promise it, logprobs to rounding."""
    if native.extension() is not None:
        assert found == expected
        return
    for ours, theirs in zip(found, expected, strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [score for _, score in ours] == pytest.approx(
            [score for _, score in theirs], abs=1e-3
        )


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_those_of_transformers(
    folder: Path, width: int, penalty: float, early: bool | str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # A token that is likely somewhere ends a beam, so that lengths differ.
    ids = torch.tensor([PROMPTS[1]])
    eos = int(model(ids).logits[0, -1].topk(3).indices[2])
    ends = {eos, model.generation_config.eos_token_id}
    model.generation_config.eos_token_id = sorted(ends)
    model.generation_config.pad_token_id = 0
    with start(folder, hf_overrides={"eos_token_id": eos}) as llm:
        for prompt in PROMPTS:
            theirs = model.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
                max_new_tokens=9, length_penalty=penalty, early_stopping=early,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            params = BeamSearchParams(
                beam_width=width, max_tokens=9, length_penalty=penalty, early_stopping=early
            )
            (output,) = llm.beam_search([prompt], params)
            scores = [
                s.cum_logprob / (len(s.tokens) - len(prompt)) ** penalty for s in output.sequences
            ]
            for ours, row in zip(output.sequences, theirs.sequences.tolist(), strict=True):
                assert ours.tokens == row[: len(ours.tokens)]
                assert set(row[len(ours.tokens) :]) <= {0}
                assert ours.finish_reason == ("stop" if ours.tokens[-1] in ends else "length")
            # Of sums of logprobs: a penalty below 0 makes scores larger.
            largest = 2e-4 * max(1.0, 9**-penalty)
            assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=largest)


PARAMS = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 5},
        {"block_size": 8, "kv_cache_memory_bytes": 1 << 16},
        {"enable_prefix_caching": False},
        {"num_threads": 2, "max_num_seqs": 64},
    ],
)
def test_beams_do_not_depend_on_seats_chunks_pool_or_company(
    folder: Path, llm: LLM, arguments: dict[str, Any]
) -> None:
    alone = [told(llm, [prompt], PARAMS)[0] for prompt in PROMPTS]
    with start(folder, **arguments) as other:
        assert_same(told(other, PROMPTS * 2, PARAMS), alone * 2)


def test_small_pool_preempts_beams(folder: Path) -> None:
    with start(folder, block_size=8, kv_cache_memory_bytes=1 << 16) as llm:
        told(llm, PROMPTS * 2, PARAMS)
        metrics = {m.name: m for m in llm.get_metrics()}
        assert metrics["pagemill:num_preemptions"].value > 0  # type: ignore[union-attr]


def test_all_blocks_come_back_after_beams_end_or_are_aborted(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("beams", {"prompt_token_ids": PROMPTS[1]}, PARAMS)
    for _ in range(4):
        assert engine.step() == []  # nothing is told before the end
    (output,) = engine.abort_request("beams")
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 4
    assert not engine.has_unfinished_requests()
    assert engine._scheduler.cache_usage() == 0.0
    told(llm, PROMPTS, PARAMS)
    assert engine._scheduler.cache_usage() == 0.0


def test_beams_and_samples_share_an_engine(llm: LLM) -> None:
    alone = told(llm, PROMPTS[:1], PARAMS)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    engine.add_request("greedy", {"prompt_token_ids": PROMPTS[1]}, greedy)
    engine.add_request("beams", {"prompt_token_ids": PROMPTS[0]}, PARAMS)
    ended = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
    beams = [(c.token_ids, c.cumulative_logprob) for c in ended["beams"].outputs]
    assert_same([beams], alone)
    (sample,) = llm.generate([PROMPTS[1]], greedy, use_tqdm=False)
    assert ended["greedy"].outputs[0].token_ids == sample.outputs[0].token_ids


def test_fewer_come_back_than_are_searched(llm: LLM) -> None:
    (all_of_them,) = told(llm, PROMPTS[:1], PARAMS)
    some = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True, n=2)
    assert told(llm, PROMPTS[:1], some) == [all_of_them[:2]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 100_000}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 1e308}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": -20.5}, "length_penalty"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 2, "stop": [""]}, "stop"),
        ({"beam_width": 2, "stop": 5}, "stop"),
        ({"beam_width": 2, "stop_token_ids": "a"}, "stop_token_ids"),
        ({"beam_width": 2, "logprobs": True}, "logprobs"),
        ({"beam_width": 2, "logprobs": -2}, "logprobs"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} is ") as caught:
        BeamSearchParams(**arguments)
    assert caught.value.param == field


@pytest.mark.parametrize("penalty", [-20.0, 20.0])
def test_the_largest_penalties_are_numbers(llm: LLM, penalty: float) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=40, length_penalty=penalty, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[:1], params)
    assert len(output.sequences) == 2


def test_more_beams_than_the_vocabulary_allows_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width is 200; with the .* tokens"):
        llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=200))
    with pytest.raises(RequestError, match="params is SamplingParams"):
        llm.beam_search(PROMPTS[:1], SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_stop_strings_end_beams_as_in_transformers(
    spelled: Path, width: int, penalty: float
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(spelled, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(spelled)
    prompt = [5, 9, 33, tokenizer.convert_tokens_to_ids("z")]  # no stop begins in it
    with start(spelled, skip_tokenizer_init=False) as llm:
        plain = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=penalty)
        (free,) = llm.beam_search([prompt], plain)
        spellings = [tokenizer.decode([t]) for t in free.sequences[0].tokens[len(prompt) :]]
        joints = [one[-1] + two[0] for one, two in itertools.pairwise(spellings)]
        stops = [joint for joint in joints if set(joint) <= set("abc")][1:3]
        theirs = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=9, length_penalty=penalty, early_stopping=False, stop_strings=stops,
            tokenizer=tokenizer, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        cut, kept = (
            llm.beam_search([prompt], dataclasses.replace(plain, stop=stops, **more))[0].sequences
            for more in ({}, {"include_stop_str_in_output": True})
        )
    assert any(isinstance(beam.stop_reason, str) for beam in cut)
    if width > 1:
        scores = [b.cum_logprob / (len(b.tokens) - len(prompt)) ** penalty for b in cut]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=2e-4)
    for beam, with_stop, row in zip(cut, kept, theirs.sequences.tolist(), strict=True):
        assert beam.tokens == with_stop.tokens == row[: len(beam.tokens)]
        assert set(row[len(beam.tokens) :]) <= {2}  # what shorter ones are filled up with
        whole = tokenizer.decode(beam.tokens, skip_special_tokens=True)
        if isinstance(beam.stop_reason, str):
            assert beam.finish_reason == "stop"
            at = whole.index(beam.stop_reason, whole.index("z"))
            assert beam.text == whole[:at]
            assert with_stop.text == whole[: at + len(beam.stop_reason)]
        else:
            assert beam.text == with_stop.text == whole
            assert all(stop not in whole[whole.index("z") :] for stop in stops)


def test_stop_token_ids_end_beams_as_end_tokens_do(folder: Path, llm: LLM) -> None:
    (free,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=3, max_tokens=9))
    stop = free.sequences[0].tokens[len(PROMPTS[0]) + 2]
    params = BeamSearchParams(beam_width=3, max_tokens=9)
    (stopped,) = llm.beam_search(PROMPTS[:1], dataclasses.replace(params, stop_token_ids=[stop]))
    with start(folder, hf_overrides={"eos_token_id": [2, stop]}) as other:
        (ended,) = other.beam_search(PROMPTS[:1], params)
    for one, two in zip(stopped.sequences, ended.sequences, strict=True):
        assert (one.tokens, one.cum_logprob) == (two.tokens, two.cum_logprob)
        assert one.finish_reason == two.finish_reason
        assert one.stop_reason == (stop if one.tokens[-1] == stop else None)
    assert any(beam.stop_reason == stop for beam in stopped.sequences)


@pytest.mark.parametrize("wanted", [None, 0, 3, 20])
def test_logprobs_of_a_beam_are_those_of_generating_from_there(
    llm: LLM, wanted: int | None
) -> None:
    params = dataclasses.replace(PARAMS, max_tokens=5, logprobs=wanted)
    prompt = PROMPTS[0]
    (output,) = llm.beam_search([prompt], params)
    for beam in output.sequences:
        own = beam.tokens[len(prompt) :]
        assert len(beam.logprobs) == len(own)
        count = 2 * PARAMS.beam_width if wanted is None else wanted
        asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=False)
        texts = [[*prompt, *own[:i]] for i in range(len(own))]
        for told, token, sampled in zip(
            beam.logprobs, own, llm.generate(texts, asked, use_tqdm=False), strict=True
        ):
            (entries,) = sampled.outputs[0].logprobs or []
            assert list(told)[:count] == list(entries)[:count]
            assert len(told) == count + (token not in list(entries)[:count])
            for other in list(told)[:count]:
                assert told[other].rank == entries[other].rank
                assert told[other].logprob == pytest.approx(entries[other].logprob, abs=1e-4)
        assert sum(
            entry[token].logprob for entry, token in zip(beam.logprobs, own, strict=True)
        ) == pytest.approx(beam.cum_logprob)


def test_as_many_logprobs_as_generate_allows(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs is 21; it must be from 0 to 20"):
        llm.beam_search(PROMPTS[:1], dataclasses.replace(PARAMS, logprobs=21))
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        llm.beam_search(PROMPTS[:1], dataclasses.replace(PARAMS, stop="x"))
