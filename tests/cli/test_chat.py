"""`pagemill chat`: turns, commands, Ctrl-C, and a conversation through a pipe."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill.cli import main
from pagemill.cli.chat import Conversation
from pagemill.errors import RequestError


class ScriptedAnswers:
    """Answers `you said X`, word by word, and keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[dict[str, Any]]] = []
        self.interrupt_after: int | None = None
        self.refuse = False
        self.closed = 0

    def stream(self, messages: list[dict[str, Any]]) -> Iterator[str]:
        self.shown.append([dict(m) for m in messages])
        if self.refuse:
            raise RequestError("too long")
        try:
            for i, word in enumerate(["you ", "said ", messages[-1]["content"]]):
                if i == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                yield word
        finally:
            self.closed += 1


@pytest.fixture
def answers() -> ScriptedAnswers:
    return ScriptedAnswers()


def test_turns_are_remembered(answers: ScriptedAnswers, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(answers, system="be brief")
    assert talk.handle("one\n")
    assert talk.handle("two")
    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert [m["role"] for m in answers.shown[-1]] == ["system", "user", "assistant", "user"]
    assert answers.shown[-1][2]["content"] == "you said one"


def test_reset_keeps_the_system_text_and_system_replaces_it(answers: ScriptedAnswers) -> None:
    talk = Conversation(answers, system="a")
    talk.handle("x")
    talk.handle("/reset")
    assert talk.messages == [{"role": "system", "content": "a"}]
    talk.handle("/system b c")
    assert talk.messages == [{"role": "system", "content": "b c"}]
    talk.handle("/system")
    assert talk.messages == []


def test_commands_answer_on_stderr_and_quit_ends(
    answers: ScriptedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(answers)
    assert talk.handle("/help")
    assert talk.handle("/nonsense")
    assert talk.handle("   ")
    assert not talk.handle("/quit")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "/reset" in captured.err and "/nonsense" in captured.err
    assert answers.shown == []


def test_interrupt_stops_the_answer_and_keeps_what_was_said(
    answers: ScriptedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell runs this behind
    answers.interrupt_after = 1
    talk = Conversation(answers)
    assert talk.handle("x")
    assert talk.messages[-1] == {"role": "assistant", "content": "you said "}
    assert answers.closed == 1
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_refused_turn_is_taken_back(
    answers: ScriptedAnswers, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(answers)
    answers.refuse = True
    assert talk.handle("x")
    assert talk.messages == []
    assert "too long" in capsys.readouterr().err
    answers.refuse = False
    talk.handle("y")
    assert len(talk.messages) == 2


def test_conversation_through_a_pipe_with_a_real_model(
    tiny_llama: str,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\nhi\n" + "x" * 400 + "\n"))
    words = ["--max-tokens", "6", "--temperature", "0", *small]
    assert main(["chat", tiny_llama, *words]) == 0
    captured = capsys.readouterr()
    first, again = captured.out.encode().split(b"\n")[0::1][:2]
    assert first == again and first
    assert "error: the prompt has" in captured.err
