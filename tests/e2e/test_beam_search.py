"""Beam search: the beams of transformers, and the same ones whatever the company and the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagemill import LLM, BeamSearchParams, SamplingParams
from pagemill.errors import RequestError
from tests.models.tiny import TINY, save_tiny

PROMPTS = [[5, 9, 33, 7], [17, 17, 3, 90, 41, 8, 22, 60, 11], [100], list(range(20, 53))]
Told = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beams") / "llama"
    save_tiny(TINY["llama"], made)
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
            assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=2e-4)


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
        assert told(other, PROMPTS * 2, PARAMS) == alone * 2


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
    assert beams == alone[0]
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
