"""llama.cpp through llama-cpp-python's C interface, with a small continuous batching loop around it.

The loop has slots, fills each step with one token of every running job and as much of the prompts as fits,
and computes a prefix that all jobs share once (what llama.cpp's server does with its prompt cache).

    python -m benchmarks.engines.llamacpp SOURCE.gguf TARGET.gguf Q4_0    quantize, with llama.cpp's own code
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass

from benchmarks import work
from benchmarks.engines.base import EngineOptions

_SLOTS = 16
_SPARE = _SLOTS  # the sequence that holds a shared prefix
_BATCH_TOKENS, _PIECE_TOKENS = 2048, 512
_MAX_CONTEXT = 16 * 1024  # the slots' longest jobs together are shorter
_SHORTEST_SHARED = 32


@dataclass(slots=True)
class _Slot:
    """A running job: its next position, its tokens so far, the last of them."""

    job: work.Job
    position: int
    num_done: int = 0
    token: int | None = None  # None while its prompt is being computed


@dataclass(frozen=True, slots=True)
class _Item:
    """One token of a batch."""

    token: int
    position: int
    slot: int
    wants_logits: bool


class LlamaCpp:
    """One context with unified KV cells for every slot."""

    def __init__(self, options: EngineOptions) -> None:
        import llama_cpp as llama

        self._llama = llama
        llama.llama_backend_init()
        model = llama.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(options.path.encode(), model)
        context = llama.llama_context_default_params()
        context.n_ctx = min(options.kv_tokens, _MAX_CONTEXT)
        context.n_batch, context.n_ubatch = _BATCH_TOKENS, _PIECE_TOKENS
        context.n_seq_max = _SLOTS + 1
        context.n_threads = context.n_threads_batch = options.threads
        context.no_perf = True
        context.flash_attn_type = 1  # on
        context.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, context)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {options.path}")
        self._memory = llama.llama_get_memory(self._context)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self.version = f"llama-cpp-python {llama.__version__}"

    def run(self, jobs: list[work.Job]) -> work.Outcome:
        """Do the jobs, as many at a time as there are slots."""
        self._llama.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        shared = _shared_prefix(jobs)
        if shared:
            prompt = jobs[0].prompt
            self._decode([_Item(prompt[i], i, _SPARE, i == shared - 1) for i in range(shared)])
        waiting, running = list(reversed(jobs)), dict[int, _Slot]()
        ttft_s, num_output = None, 0
        while waiting or running:
            self._admit(waiting, running, shared)
            items, ends = _next_batch(running)
            self._decode(items)
            if ttft_s is None and ends:
                ttft_s = time.perf_counter() - start
            num_output += len(ends)
            for number, row in ends.items():
                slot = running[number]
                slot.token, slot.num_done = self._greedy_token(row), slot.num_done + 1
                if slot.num_done == slot.job.num_output:
                    self._llama.llama_memory_seq_rm(self._memory, number, 0, -1)
                    del running[number]
        return work.Outcome(time.perf_counter() - start, num_output, ttft_s)

    def _admit(self, waiting: list[work.Job], running: dict[int, _Slot], shared: int) -> None:
        for number in range(_SLOTS):
            if waiting and number not in running:
                if shared:
                    self._llama.llama_memory_seq_cp(self._memory, _SPARE, number, 0, shared)
                running[number] = _Slot(waiting.pop(), shared)

    def _decode(self, items: list[_Item]) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for i, item in enumerate(items):
            batch.token[i], batch.pos[i] = item.token, item.position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, item.slot
            batch.logits[i] = item.wants_logits
        code = self._llama.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(items)} tokens")

    def _greedy_token(self, row: int) -> int:
        import numpy as np

        logits = self._llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def _shared_prefix(jobs: list[work.Job]) -> int:
    """Return how many tokens all prompts begin with, less the last of any; 0 where it is not worth it."""
    if len(jobs) == 1:
        return 0
    shared = min(len(job.prompt) for job in jobs) - 1
    for job in jobs[1:]:
        pairs = zip(job.prompt[:shared], jobs[0].prompt[:shared], strict=True)
        shared = next((i for i, (one, other) in enumerate(pairs) if one != other), shared)
    return shared if shared >= _SHORTEST_SHARED else 0


def _next_batch(running: dict[int, _Slot]) -> tuple[list[_Item], dict[int, int]]:
    """Return a step's tokens, and for each slot that gets a new token the row of its logits."""
    items: list[_Item] = []
    ends: dict[int, int] = {}
    for number, slot in running.items():
        if slot.token is not None:
            ends[number] = len(items)
            items.append(_Item(slot.token, slot.position, number, True))
            slot.position += 1
    for number, slot in running.items():
        if slot.token is not None:
            continue
        prompt, first = slot.job.prompt, slot.position
        slot.position = min(len(prompt), first + _BATCH_TOKENS - len(items))
        for i in range(first, slot.position):
            is_last = i == len(prompt) - 1
            if is_last:
                ends[number] = len(items)
            items.append(_Item(prompt[i], i, number, is_last))
    return items, ends


def load(options: EngineOptions) -> LlamaCpp:
    """Load llama.cpp."""
    return LlamaCpp(options)


def quantize(source: str, target: str, weights: str) -> None:
    """Write a quantized copy of a .gguf file."""
    import llama_cpp as llama

    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{weights}")
    code = llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters))
    if code != 0:
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {weights}: it returned {code}")


if __name__ == "__main__":
    quantize(*sys.argv[1:4])
