"""Rounds of engines in turn, with stand-ins for their processes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import turns, work
from benchmarks.engines.process import EngineFailed
from benchmarks.peers import parse_formats, parse_rounds
from benchmarks.turns import Entrant, Schedule, take_turns


class Process:
    """Stands in for `EngineProcess`: answers at once, and notes who had which turn."""

    turns: list[tuple[str, str, str]] = []
    lives: list[str] = []  # "command begins", "command ends"
    version = "1.0"

    def __init__(self, name: str, arguments: list[str], threads: int) -> None:
        self.name, self.words = name, " ".join(arguments)

    def __enter__(self) -> Process:
        self.lives.append(f"{self.words} begins")
        return self

    def __exit__(self, *error: object) -> None:
        self.lives.append(f"{self.words} ends")

    def wait_ready(self) -> None: ...

    def run(self, case: str, round: str) -> dict[str, float]:
        self.turns.append((self.name, case, round))
        return {"wall_s": float(len(self.turns))}

    def idle_share(self, seconds: float) -> float:
        return 0.0

    def resident_bytes(self) -> int:
        return 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    noted: list[tuple[str, str, str]] = []
    monkeypatch.setattr(Process, "turns", noted)
    monkeypatch.setattr(Process, "lives", [])
    monkeypatch.setattr(turns, "EngineProcess", Process)
    return noted


def one(name: str, **more: Any) -> Entrant:
    return Entrant(name, "bf16", name, {case: [name, case] for case in work.CASES}, **more)


def test_engines_alternate_and_only_in_their_cases(seen: list[tuple[str, str, str]]) -> None:
    first, second = one("first"), one("second", cases="e")
    take_turns([first, second], Schedule("de", {"d": 1, "e": 2}), 1, None)
    names = [(name.split()[0], case, round) for name, case, round in seen]
    warm = work.WARM_UP
    assert names == [
        ("first", "d", warm), ("first", "d", "0"), ("first", "e", warm), ("second", "e", warm),
        ("first", "e", "0"), ("second", "e", "0"), ("first", "e", "1"), ("second", "e", "1"),
    ]  # fmt: skip
    assert len(first.rounds["e"]) == 2
    assert "d" not in second.rounds


def test_each_case_has_engines_of_its_own(seen: list[tuple[str, str, str]]) -> None:
    first, second = one("first", cases="d"), one("second")
    take_turns([first, second], Schedule("de", {"d": 1, "e": 1}), 1, None)
    assert Process.lives == [
        "first d begins", "second d begins", "second d ends", "first d ends",
        "second e begins", "second e ends",
    ]  # fmt: skip


def test_engine_that_fails_is_out_of_its_case_and_the_others_go_on(
    seen: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Process.run

    def run(self: Process, case: str, round: str) -> dict[str, float]:
        if self.words == "first d" and round == "1":
            raise EngineFailed("killed")
        return real(self, case, round)

    monkeypatch.setattr(Process, "run", run)
    first, second = one("first"), one("second")
    take_turns([first, second], Schedule("de", {"d": 3, "e": 1}), 1, None)
    assert {case: len(rounds) for case, rounds in first.rounds.items()} == {"d": 1, "e": 1}
    assert {case: len(rounds) for case, rounds in second.rounds.items()} == {"d": 3, "e": 1}
    assert first.failure == "killed"


def test_engine_may_take_part_in_fewer_rounds(seen: list[tuple[str, str, str]]) -> None:
    first, second = one("first"), one("second")
    take_turns([first, second], parse_rounds("3,d/second=1", "d"), 1, None)
    assert len(first.rounds["d"]) == 3
    assert len(second.rounds["d"]) == 1


def test_interrupted_rounds_leave_what_was_measured(
    seen: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Process.run

    def run(self: Process, case: str, round: str) -> dict[str, float]:
        if (case, round) == ("e", "1"):
            raise KeyboardInterrupt
        return real(self, case, round)

    monkeypatch.setattr(Process, "run", run)
    first = one("first")
    limits = take_turns([first], Schedule("dea", {"d": 1, "e": 5, "a": 5}), 1, None)
    assert list(limits) == ["d", "e"]
    assert {case: len(rounds) for case, rounds in first.rounds.items()} == {"d": 1, "e": 1}


def test_formats_and_rounds_may_have_their_own() -> None:
    assert parse_formats("bf16,int8=ad,int4=a", "abd") == {"bf16": "abd", "int8": "ad", "int4": "a"}
    schedule = parse_rounds("7,c=2,a/vllm=3", "ac")
    assert schedule.rounds == {"a": 7, "c": 2}
    assert schedule.num_rounds("a", "vllm") == 3
    assert schedule.num_rounds("c", "vllm") == 2
