"""Commands whose streams are closed, full, gone, or of an encoding that lacks the characters."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.cli import main

HELP = [["--help"], ["serve", "--help"], ["pull", "--help"]]


def shell(words: list[str], rest: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m pagemill {' '.join(words)} {rest}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True)


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_closed_output_is_no_error(words: list[str]) -> None:
    run = shell(words, ">&-")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_reader_that_is_gone_already_ends_the_command_quietly(words: list[str]) -> None:
    # The reader is gone before the first byte: `exec` closes its end, then lets the command begin.
    run = shell(words, "> >(exec <&-; sleep 0.2)")
    assert run.stderr == ""
    assert run.returncode in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_full_disk_is_one_line_and_exit_code_1(words: list[str]) -> None:
    run = shell(words, "> /dev/full")
    assert run.returncode == 1
    assert run.stderr.startswith("pagemill: error: cannot read or write: ")
    assert "No space left" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_closed_input_is_empty_input(
    command: str,
    tiny_llama: str,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code = main([command, "--model", tiny_llama, *small])
    sys.stdin.close()
    if command == "generate":
        assert code == 1
        assert "no prompt" in capsys.readouterr().err
    else:
        assert code == 0


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bytes_that_are_no_text_are_refused_with_their_position(
    encoding: str,
    tiny_llama: str,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding=encoding))
    assert main(["generate", "--model", tiny_llama, *small]) == 1
    err = capsys.readouterr().err
    assert "U+DCFF at character 2" in err.splitlines()[-1]


@pytest.mark.parametrize("as_json", [False, True])
def test_characters_that_the_terminal_lacks_are_escaped(
    as_json: bool, tiny_llama: str, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    words = ["--model", tiny_llama, "--max-tokens", "2", *(["--json"] if as_json else [])]
    assert main(["generate", "é", *words, *small]) == 0
    text = written.getvalue().decode("ascii")
    if as_json:
        assert json.loads(text)["prompt"] == "é"
    else:
        assert text.startswith("\\xe9")
