"""Rounds of engines in turn, with stand-ins for their processes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import turns, work
from benchmarks.peers import parse_formats, parse_rounds
from benchmarks.turns import Entrant, Schedule, take_turns


class Process:
    """Stands in for `EngineProcess`: answers at once, and notes who had which turn."""

    turns: list[tuple[str, str, str]] = []
    ended: list[tuple[str, int]] = []  # and after how many turns
    version = "1.0"

    def __init__(self, name: str, arguments: list[str], threads: int) -> None:
        self.name = name

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None:
        self.ended.append((self.name.split()[0], len(self.turns)))

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
    monkeypatch.setattr(Process, "ended", [])
    monkeypatch.setattr(turns, "EngineProcess", Process)
    return noted


def one(name: str, **more: Any) -> Entrant:
    return Entrant(name, "bf16", name, ["x"], **more)


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


def test_engine_ends_after_the_last_of_its_cases(seen: list[tuple[str, str, str]]) -> None:
    first, second = one("first", cases="d"), one("second")
    take_turns([first, second], Schedule("dea", {"d": 1, "e": 1, "a": 1}), 1, None)
    assert Process.ended == [("first", 4), ("second", 8)]


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
    assert parse_rounds("7,c=2", "ac") == {"a": 7, "c": 2}
