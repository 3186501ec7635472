"""A tier file that outlives its engine: prefixes are found after a restart, and never a lie is told.

Engines are killed with SIGKILL at random moments while they write; files are damaged, cut and refused; the
disk is full. Whatever happens, every answer is the one that an engine without a tier gives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagemill import LLM, SamplingParams
from pagemill.batch.tier_file import HEADER_BYTES
from pagemill.engine.async_engine import AsyncLLMEngine
from pagemill.engine_args import EngineArgs
from tests.e2e.native_runs import Answer, answers
from tests.fakes.fake_model import save_tiny_llama
from tests.ops.conftest import needs_extension

pytestmark = needs_extension
MAX_LEN = 64
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, detokenize=False
)
PROMPTS = [[97 + (i * k) % 23 for i in range(40)] for k in range(1, 9)]
POOL = {"block_size": 8, "kv_cache_memory_bytes": 12 * 2 * 2 * 2 * 16 * 4 * 8}  # 12 blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position=MAX_LEN)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    with engine(folder, swap_space=0, enable_prefix_caching=False) as llm:
        return answers(llm, PROMPTS, PARAMS, alone=True)


def engine(folder: Path, **arguments: Any) -> LLM:
    settled: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": MAX_LEN,
        "num_threads": 1,
        "debug": True,
        "swap_dir": str(folder.parent / "swap"),
        **POOL,
    }
    return LLM(str(folder), **{**settled, **arguments})


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == f"pagemill:{name}")


def fill(folder: Path, path: Path) -> None:
    """Let an engine write all prompts to the file: its pool holds two of them at a time."""
    with engine(folder, kv_cache_file=str(path)) as llm:
        for prompt in (*PROMPTS, *PROMPTS):
            llm.generate(prompt, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("executor", ["in_process", "multi_process"])
def test_a_restarted_engine_answers_known_prefixes_without_computing_them(
    folder: Path, expected: list[Answer], tmp_path: Path, executor: str
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)
    with engine(folder, kv_cache_file=str(path), distributed_executor_backend=executor) as llm:
        outputs = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        # Five full blocks of the prompt; the last one is computed again for its last token.
        assert outputs[0].num_cached_tokens == 32
        assert metric(llm, "prefix_cache_host_hits") == 32
        assert metric(llm, "swapped_in_blocks") == 4
        assert answers(llm, PROMPTS, PARAMS) == expected


def test_a_prefix_that_was_never_evicted_is_found_as_well(
    folder: Path, expected: list[Answer], tmp_path: Path
) -> None:
    large = {"kv_cache_memory_bytes": 1 << 22, "kv_cache_file": str(tmp_path / "tier")}
    with engine(folder, **large) as llm:
        one = dataclasses.replace(PARAMS, max_tokens=1)
        llm.generate(PROMPTS[0], one, use_tqdm=False)  # written when the engine ends
        llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)  # written by the steps after the first
        assert metric(llm, "swapped_out_blocks") > 0
    with engine(folder, **large) as llm:
        outputs = llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [32, 32]
        assert answers(llm, PROMPTS[:2], PARAMS) == expected[:2]


def test_a_reset_cache_is_not_found_after_a_restart(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tier"
    with engine(folder, kv_cache_file=str(path)) as llm:
        for prompt in (*PROMPTS, *PROMPTS):
            llm.generate(prompt, PARAMS, use_tqdm=False)
        llm.reset_prefix_cache()
        llm.generate([5] * 20, PARAMS, use_tqdm=False)
    with engine(folder, kv_cache_file=str(path)) as llm:
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("executor", ["in_process", "multi_process"])
def test_when_a_reset_returns_the_file_holds_no_name(
    folder: Path, expected: list[Answer], tmp_path: Path, executor: str
) -> None:
    """Whatever becomes of the engine then: a copy of the file is what a kill leaves behind."""
    path = tmp_path / "tier"
    fill(folder, path)
    with engine(folder, kv_cache_file=str(path), distributed_executor_backend=executor) as llm:
        core = llm.llm_engine
        for i, prompt in enumerate(PROMPTS):
            core.add_request(str(i), prompt, PARAMS)
        outputs = []
        for _ in range(4):  # where steps overlap, one is in flight now
            outputs += core.step()
        assert core.reset_prefix_cache() is True
        shutil.copy(path, tmp_path / "copy")
        while core.has_unfinished_requests():
            outputs += core.step()
        finals = {out.request_id: list(out.outputs[0].token_ids) for out in outputs}
        for i, prompt in enumerate(PROMPTS):
            again = llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
            assert finals[str(i)] == list(again)
        assert answers(llm, PROMPTS, PARAMS) == expected
    with engine(folder, kv_cache_file=str(tmp_path / "copy")) as llm:
        for prompt in PROMPTS:
            one = llm.generate(prompt, PARAMS, use_tqdm=False)[0]
            assert metric(llm, "prefix_cache_host_hits") == 0, one.request_id


def test_a_reset_reaches_the_slots_that_a_smaller_tier_did_not_open(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)
    with engine(folder, kv_cache_file=str(path), swap_space=20_000 / 2**30) as llm:
        assert llm.reset_prefix_cache()
    with engine(folder, kv_cache_file=str(path)) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, PARAMS, use_tqdm=False)
        assert metric(llm, "prefix_cache_host_hits") == 0


@pytest.mark.parametrize("home", ["thread", "process"])
def test_an_async_engine_has_emptied_the_file_when_it_says_so(
    folder: Path, tmp_path: Path, home: str
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, max_model_len=MAX_LEN, num_threads=1,
        kv_cache_file=str(path), **POOL,
    )  # fmt: skip

    async def reset() -> bool:
        served = AsyncLLMEngine.from_engine_args(args, home=home)
        try:
            done = await served.reset_prefix_cache()
            shutil.copy(path, tmp_path / "copy")
            return done
        finally:
            served.shutdown()

    assert asyncio.run(reset()) is True
    with engine(folder, kv_cache_file=str(tmp_path / "copy")) as llm:
        llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        assert metric(llm, "prefix_cache_host_hits") == 0


def test_a_reset_that_the_disk_refuses_is_not_called_done(
    folder: Path,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with engine(folder, kv_cache_file=str(path)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", broken)
            assert llm.reset_prefix_cache() is False
            assert answers(llm, PROMPTS, PARAMS) == expected
        assert llm.reset_prefix_cache() is True, "the tier has ended; its file can still be emptied"
    with engine(folder, kv_cache_file=str(path)) as llm:
        llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        assert metric(llm, "prefix_cache_host_hits") == 0


def test_a_reset_of_an_engine_that_could_not_open_its_file_is_not_called_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        llm = engine(folder, kv_cache_file=str(path))
    with llm:
        assert llm.reset_prefix_cache() is False


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut", "cut while open", "other blocks"])
def test_damage_costs_time_and_no_answer(
    folder: Path, expected: list[Answer], tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "tier"
    fill(folder, path)
    if damage != "cut while open":
        _damage(path, damage)
    with engine(folder, kv_cache_file=str(path)) as llm:
        if damage == "cut while open":
            _damage(path, "cut")
        assert answers(llm, PROMPTS, PARAMS) == expected
        assert answers(llm, PROMPTS, PARAMS, alone=True) == expected


def _damage(path: Path, kind: str) -> None:
    draw = random.Random(kind)
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        for _ in range(60):
            data[draw.randrange(HEADER_BYTES, len(data))] ^= 1 << draw.randrange(8)
    elif kind == "zeroed":
        middle = (HEADER_BYTES + len(data)) // 2 // 512 * 512
        data[middle:] = bytes(len(data) - middle)
    elif kind == "cut":
        del data[len(data) // 3 :]
    else:  # records change places
        half = (len(data) - HEADER_BYTES) // 2 // 4096 * 4096
        first = data[HEADER_BYTES : HEADER_BYTES + half]
        data[HEADER_BYTES : HEADER_BYTES + half] = data[HEADER_BYTES + half :][:half]
        data[HEADER_BYTES + half :][:half] = first
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def test_a_full_disk_costs_no_request(
    folder: Path,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for room in (0, 5, 17):
        with engine(
            folder, kv_cache_file=str(tmp_path / f"tier{room}"), preemption_mode="swap"
        ) as llm:
            whole, left = os.pwritev, [room]

            def scarce(
                fd: int, parts: Any, offset: int, whole: Any = whole, left: list[int] = left
            ) -> int:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(whole(fd, parts, offset))

            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", scarce)
                assert answers(llm, PROMPTS, PARAMS) == expected
                assert answers(llm, PROMPTS, PARAMS) == expected
            assert left[0] < 0, "the disk was not full"


_SERVICE = """
import sys
from pathlib import Path
from tests.e2e.test_lasting_cache import PARAMS, PROMPTS, engine
llm = engine(Path(sys.argv[1]), kv_cache_file=sys.argv[2])
print("ready", flush=True)
while True:
    for prompt in PROMPTS:
        llm.generate([prompt, [*prompt[:20], int(sys.argv[3]) % 97]], PARAMS, use_tqdm=False)
"""


def test_an_engine_killed_at_random_moments_tells_the_truth_when_it_is_back(
    folder: Path, expected: list[Answer], tmp_path: Path
) -> None:
    path, draw = tmp_path / "tier", random.Random(11)
    num_found = 0.0
    for round_ in range(2):
        service = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, str(folder), str(path), str(round_)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        time.sleep(draw.random() * 0.2)
        service.send_signal(signal.SIGKILL)
        service.wait()
        service.stdout.close()
        with engine(folder, kv_cache_file=str(path)) as llm:
            assert answers(llm, PROMPTS, PARAMS) == expected
            num_found += metric(llm, "prefix_cache_host_hits")
    assert num_found > 0
