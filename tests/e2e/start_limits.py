"""Start an engine and let it answer, again and again, each time with a little more memory; print how each try ended.

A program, not a test: `python start_limits.py MODEL 2 int4 0 8 16 32`, with the path of a model, the threads, a
quantization (or "auto"), and how many MiB a try may have beyond what the process has when all modules are
there. A try is a process of its own, so one that dies is seen, or hangs: it has a minute. Prints a line for
each: its MiB, "answered", the words of a PagemillError, or how it died.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: F401  what has to be there anyway is imported before the limit

from pagemill import LLM, SamplingParams
from pagemill.errors import PagemillError
from tests.limited_child import MIB, said_with


def answer(model: str, num_threads: int, quantization: str) -> str:
    """Start, answer, stop; return how it ended."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    asked = None if quantization == "auto" else quantization
    try:
        with LLM(
            model,
            quantization=asked,
            max_model_len=128,
            kv_cache_memory_bytes=16 * MIB,
            max_num_seqs=4,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=2)
            [output] = llm.generate(["abc"], params, use_tqdm=False)
        return "answered" if output.error is None else f"broke: {output.error}"
    except PagemillError as error:
        return f"refused: {error}"


def main(model: str, num_threads: str, quantization: str, *rooms: str) -> None:
    """Make the tries."""
    start = functools.partial(answer, model, int(num_threads), quantization)
    for room in rooms:
        print(room, said_with(int(room), start), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
