"""What every executor keeps, and what the one with its own process adds."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.config import EngineConfig, ParallelConfig
from pagemill.errors import CacheTooSmallError, EngineDeadError, UnknownNameError
from pagemill.executor import EXECUTORS
from pagemill.executor.base import Executor
from pagemill.executor.multi_process import MultiProcessExecutor
from pagemill.messages import NewSequence, SamplingSpec, ScheduledSequence, SchedulerOutput
from pagemill.models import MODELS
from tests.fakes.fake_model import fake_config, save_tiny_llama

PROMPT = tuple(b"Hello")


def config_of(folder: Path, executor: str) -> EngineConfig:
    hf_config = json.loads((folder / "config.json").read_text())
    base = fake_config(block_size=16, hf_config=hf_config)
    model = dataclasses.replace(
        base.model,
        model_type="llama",
        load_format="safetensors",
        model=str(folder),
        path=str(folder),
        shape=MODELS.load("llama").read_shape(hf_config),
    )
    return dataclasses.replace(base, model=model, parallel=ParallelConfig(executor=executor))


def step(step_id: int, computed: int, count: int, **more: object) -> SchedulerOutput:
    blocks = (3, 4, 5, 6) if not computed else ()
    part = ScheduledSequence(0, computed, count, 0, blocks, 1)
    return SchedulerOutput(step_id=step_id, scheduled=(part,), **more)  # type: ignore[arg-type]


def first_step(spec: SamplingSpec, step_id: int = 0) -> SchedulerOutput:
    new = NewSequence(0, "r", PROMPT, len(PROMPT), 0, spec)
    return step(step_id, 0, len(PROMPT), new_sequences=(new,), removed_seq_ids=(0,))


def generate(executor: Executor, count: int, spec: SamplingSpec) -> list[int]:
    tokens = list(executor.execute(first_step(spec)).sequences[0].tokens[0])
    for i in range(1, count):
        result = executor.execute(step(i, len(PROMPT) + i - 1, 1))
        assert result.step_id == i
        tokens += result.sequences[0].tokens[0]
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[MultiProcessExecutor]:
    """Yield one executor with a process; tests that use it leave it able to go on."""
    executor = MultiProcessExecutor(config_of(folder, "multi_process"))
    yield executor
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health()
    assert executor._process.returncode == 0


def test_names_and_aliases() -> None:
    assert EXECUTORS.load("uni") is EXECUTORS.load("in_process")
    assert EXECUTORS.load("mp") is EXECUTORS.load("multi_process")
    with pytest.raises(UnknownNameError, match="known: in_process"):
        EXECUTORS.load("ray")


def test_both_executors_answer_the_same(folder: Path, shared: MultiProcessExecutor) -> None:
    inside = EXECUTORS.load("in_process")(config_of(folder, "in_process"))
    assert dataclasses.replace(inside.memory_plan, available_bytes=0, usable_bytes=0) == (
        dataclasses.replace(shared.memory_plan, available_bytes=0, usable_bytes=0)
    )
    for spec in (SamplingSpec(temperature=0.0), SamplingSpec(temperature=1.0, seed=5)):
        assert generate(inside, 6, spec) == generate(shared, 6, spec)
    inside.check_health()
    inside.shutdown()
    inside.shutdown()
    with pytest.raises(EngineDeadError):
        inside.execute(step(99, 0, 1))


def test_exception_of_a_step_is_raised_here_with_its_own_type(
    shared: MultiProcessExecutor,
) -> None:
    with pytest.raises(KeyError):
        shared.execute(
            SchedulerOutput(step_id=1, scheduled=(ScheduledSequence(12345, 0, 1, 0, (), 1),))
        )
    assert len(generate(shared, 2, SamplingSpec(temperature=0.0))) == 2


def test_answer_missed_by_an_interrupt_is_not_taken_for_the_next(
    shared: MultiProcessExecutor,
) -> None:
    shared._pipe.send(first_step(SamplingSpec(temperature=0.0), step_id=41))
    shared._unread.append(41)
    assert len(generate(shared, 3, SamplingSpec(temperature=0.0))) == 3


def test_processor_that_cannot_be_sent_fails_its_own_sequence(
    shared: MultiProcessExecutor,
) -> None:
    spec = SamplingSpec(temperature=0.0, logits_processors=(lambda ids, logits: logits,))
    output = shared.execute(first_step(spec)).sequences[0]
    assert output.tokens == () and "in_process" in (output.error or "")
    assert len(generate(shared, 2, SamplingSpec(temperature=0.0))) == 2


def test_interrupt_key_does_not_end_the_worker(shared: MultiProcessExecutor) -> None:
    pid = shared._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert len(generate(shared, 2, SamplingSpec(temperature=0.0))) == 2


def test_killed_worker_is_reported_with_its_signal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = MultiProcessExecutor(config_of(folder, "multi_process"))
    pid = executor._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGABRT)
    with pytest.raises(EngineDeadError, match=r"exit code -6 \(SIGABRT\).*\n") as caught:
        while True:
            executor.execute(SchedulerOutput(step_id=0, scheduled=()))
    assert "Fatal Python error: Aborted" in str(caught.value)
    with pytest.raises(EngineDeadError):
        executor.check_health()
    executor.shutdown()


def test_errors_of_loading_keep_type_and_message(folder: Path) -> None:
    config = config_of(folder, "multi_process")
    cache = dataclasses.replace(config.cache, num_blocks=None, kv_cache_memory_bytes=5000)
    with pytest.raises(CacheTooSmallError, match="kv_cache_memory_bytes"):
        MultiProcessExecutor(dataclasses.replace(config, cache=cache))


UNGUARDED = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.executor.test_executors import config_of, generate
from pagemill.executor.multi_process import MultiProcessExecutor
from pagemill.messages import SamplingSpec
executor = MultiProcessExecutor(config_of(Path({folder!r}), "multi_process"))
print(executor._process.pid, generate(executor, 3, SamplingSpec(temperature=0.0)), flush=True)
"""


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_program_needs_no_guard_and_leaves_no_worker_behind(
    folder: Path, tmp_path: Path, source: str, shared: MultiProcessExecutor
) -> None:
    text = UNGUARDED.format(root=str(Path(__file__).parents[2]), folder=str(folder))
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-" if source == "standard input" else str(script)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    worker_pid, tokens = done.stdout.split(maxsplit=1)
    assert json.loads(tokens) == generate(shared, 3, SamplingSpec(temperature=0.0))
    assert not is_running(int(worker_pid))


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from pagemill.executor.multi_process import MultiProcessExecutor
from tests.executor.test_executors import config_of
if __name__ == "__main__":
    executor = MultiProcessExecutor(config_of(Path({folder!r}), "multi_process"))
    print(executor._process.pid, flush=True)
    time.sleep(60)
"""


def test_worker_ends_when_its_parent_is_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    root = str(Path(__file__).parents[2])
    script.write_text(PARENT.format(root=root, folder=str(folder)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        worker_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(worker_pid):
        time.sleep(0.05)
    assert not is_running(worker_pid)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_submitted_steps_are_computed_in_turn(shared: MultiProcessExecutor) -> None:
    spec = SamplingSpec(temperature=0.0)
    expected = generate(shared, 6, spec)
    shared.submit(first_step(spec))
    tokens: list[int] = []
    for i in range(1, 7):
        if i < 6:
            shared.submit(step(i, len(PROMPT) + i - 1, 1))
        result = shared.collect()
        assert result.step_id == i - 1
        tokens += result.sequences[0].tokens[0]
    assert tokens == expected


def test_a_long_message_behind_another_step_is_sent_when_that_has_its_answer(
    shared: MultiProcessExecutor,
) -> None:
    spec = SamplingSpec(temperature=0.0)
    first = generate(shared, 1, spec)
    shared.submit(first_step(spec))
    long = dataclasses.replace(spec, stop_token_ids=tuple(range(200_000)))
    shared.submit(first_step(long, step_id=1))
    assert shared._unsent is not None
    for _ in range(2):
        assert list(shared.collect().sequences[0].tokens[0]) == first
    assert shared._unsent is None
