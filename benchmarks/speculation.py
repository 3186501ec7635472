"""Speculative decoding against the same engine without it, in one run.

    python -m benchmarks.speculation [--model PATH] [--draft PATH] [--rounds 3] [--tokens 180] [--threads N]

Cases, greedy, each engine with its cache of prefixes on:

    rewrite    one request: a page of `benchmarks/texts/alice.txt` to be corrected and repeated
    again      one request after another that got nearly the same answer (other words in the question)
    story      one request with nothing to copy
    rewrite 8  eight requests at once, pages of their own

All engines are loaded first, with the same weights, and take turns. "draft" drafts with the same weights in int4, or with
`--draft`. What is measured is the time of the whole request but its prompt: from the first token to the last. Answers are compared;
one that differs from the plain engine's ends the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import smollm2_gguf
from pagemill import LLM, SamplingParams
from pagemill.outputs import RequestOutput

TEXT = Path(__file__).parent / "texts" / "alice.txt"
PAGE = 1100  # characters
ASKED = "Correct the spelling of the following text and repeat it in full. Change nothing else."
ASKED_AGAIN = "Please repeat the following text in full, with its spelling corrected."
STORY = "Write a story about a lighthouse keeper who finds a map."


@dataclass(slots=True)
class Entrant:
    """One engine and what was measured of it."""

    name: str
    llm: LLM
    seconds_a_token: dict[str, list[float]] = field(default_factory=dict)  # by case
    steps: dict[str, int] = field(default_factory=dict)  # of the last round
    accepted: dict[str, float] = field(default_factory=dict)

    def counted(self) -> dict[str, float]:
        """Return the engine's counters."""
        found = {}
        for metric in self.llm.get_metrics():
            found[metric.name.rpartition(":")[2]] = (
                metric.value if metric.count is None else float(metric.count)
            )
        return found


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--draft", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=180)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cases", default="rewrite,again,story,rewrite 8")
    parser.add_argument("--methods", default="off,ngram,suffix,draft")
    options = parser.parse_args()
    model = options.model or str(smollm2_gguf())
    draft = {"model": options.draft} if options.draft else {"model": model, "quantization": "int4"}
    settings: dict[str, dict[str, Any] | None] = {
        "off": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        "suffix": {"method": "suffix"},
        "draft": draft,
    }
    entrants = [
        Entrant(name, load(model, settings[name], options.threads))
        for name in options.methods.split(",")
    ]
    cases = options.cases.split(",")
    for number in range(options.rounds + 1):  # the first one warms up
        for case in cases:
            told = [take_turn(e, case, number, options.tokens) for e in entrants]
            for entrant, answers in zip(entrants, told, strict=True):
                if answers != told[0]:
                    raise SystemExit(f"{entrant.name} answers {case} differently")
        if number == 0:
            for entrant in entrants:
                entrant.seconds_a_token.clear()
    report(entrants, cases)


def load(model: str, speculative: dict[str, Any] | None, threads: int | None) -> LLM:
    """Start an engine in bfloat16."""
    return LLM(
        model, dtype="bfloat16", quantization="none", max_model_len=2048, max_num_seqs=16,
        kv_cache_memory_bytes=1 << 29, speculative_config=speculative, num_threads=threads,
        swap_space=0,
    )  # fmt: skip


def take_turn(entrant: Entrant, case: str, number: int, num_tokens: int) -> list[list[int]]:
    """Run a case once, keep its figures, and return the answers."""
    text = TEXT.read_text(encoding="utf-8")
    page = text[number * PAGE : (number + 1) * PAGE]
    if case == "story":
        messages = [[{"role": "user", "content": f"{STORY} Its number is {number}."}]]
    elif case == "again":
        messages = [[{"role": "user", "content": f"{ASKED_AGAIN}\n\n{page}"}]]
    elif case == "rewrite 8":
        starts = [(number * 311 + i * 977) % (len(text) - PAGE) for i in range(8)]
        messages = [
            [{"role": "user", "content": f"{ASKED}\n\n{text[start : start + PAGE]}"}]
            for start in starts
        ]
    else:
        messages = [[{"role": "user", "content": f"{ASKED}\n\n{page}"}]]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=case == "story")
    before = entrant.counted()
    start = time.perf_counter()
    outputs: list[RequestOutput] = entrant.llm.chat(messages, params, use_tqdm=False)
    seconds = decode_seconds(outputs) or time.perf_counter() - start
    after = entrant.counted()
    changed = {name: after[name] - before.get(name, 0.0) for name in after}
    made = sum(len(output.outputs[0].token_ids) for output in outputs) - len(outputs)
    entrant.seconds_a_token.setdefault(case, []).append(seconds / made)
    entrant.steps[case] = int(changed["iteration_tokens_total"])
    drafted = changed.get("spec_decode_num_draft_tokens", 0.0)
    accepted = changed.get("spec_decode_num_accepted_tokens", 0.0)
    entrant.accepted[case] = accepted / drafted if drafted else 0.0
    print(f"round {number}: {case}, {entrant.name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return [list(output.outputs[0].token_ids) for output in outputs]


def decode_seconds(outputs: list[RequestOutput]) -> float | None:
    """Return the time from the first token of all to the last."""
    firsts = [o.metrics.first_token_time for o in outputs if o.metrics is not None]
    lasts = [o.metrics.last_token_time for o in outputs if o.metrics is not None]
    if not firsts or None in firsts or None in lasts:
        return None
    return max(t for t in lasts if t is not None) - min(t for t in firsts if t is not None)


def report(entrants: list[Entrant], cases: list[str]) -> None:
    """Print tokens a second, how many times the first engine's, steps and accepted drafts."""
    print("| case | method | tokens/s | times | steps | accepted |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        plain = statistics.median(entrants[0].seconds_a_token[case])
        for entrant in entrants:
            seconds = statistics.median(entrant.seconds_a_token[case])
            accepted = f"{100 * entrant.accepted[case]:.0f} %" if entrant.accepted[case] else ""
            print(
                f"| {case} | {entrant.name} | {1 / seconds:.1f} | {plain / seconds:.2f} "
                f"| {entrant.steps[case]} | {accepted} |"
            )


if __name__ == "__main__":
    main()
