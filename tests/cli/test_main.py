"""The command line as a program: help, exit codes, one clear line for every failure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import native
from pagemill.cli import COMMANDS, main
from pagemill.cli.collect_env import PACKAGES
from pagemill.errors import ConfigError
from pagemill.version import __version__


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagemill {__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    assert f"pagemill {name}" in capsys.readouterr().out


def test_help_groups_the_flags_and_hides_refused_features(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    for title in ("HTTP server:", "KV cache:", "scheduler:", "model:"):
        assert title in out
    assert "--enable-lora" not in out
    assert "--max-model-len" in out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "'serve'" in capsys.readouterr().err


def test_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-model-length", "5"]) == 2
    assert "--max-model-len'" in capsys.readouterr().err


def test_group_without_command_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "bench latency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--swap-space", "-1"], "swap_space"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["--port", "70000"], "port"),
        (["--enable-lora"], "enable_lora"),
    ],
)
def test_refused_argument_is_one_line_and_exit_code_1(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("pagemill: error: ")
    assert len(err.splitlines()) == 1


def test_interrupt_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagemill.cli.collect_env.run", interrupted)
    assert main(["collect-env"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from pagemill.cli import main; main(['--help']); main(['serve', '--help']);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'starlette', 'uvicorn', 'yaml', 'tqdm'};"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_reader_that_goes_away_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m pagemill serve --help | head -c 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stderr == ""


def test_collect_env_names_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    for what in ("pagemill", "torch", "CPU features", "memory", "compiler", native.describe()):
        assert what in out


def test_collect_env_says_how_to_get_kernels_that_are_not_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    assert main(["collect-env"]) == 0
    assert "no native kernels are built" in (out := capsys.readouterr().out)
    assert "make build" in out


def test_collect_env_lists_dependencies_and_what_an_extra_brings() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    named = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    extra = re.search(r"^transformers = \[(.*?)\]$", text, re.MULTILINE)
    assert named is not None and extra is not None
    assert set(PACKAGES) == set(re.findall(r'"([a-z0-9-]+)[>=<]', named[1] + extra[1]))


def test_error_of_several_lines_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(args: object) -> int:
        raise ConfigError("what a library says:\n(1) one thing\n(2) another")

    monkeypatch.setattr("pagemill.cli.collect_env.run", failing)
    assert main(["collect-env"]) == 1
    expected = "pagemill: error: what a library says: (1) one thing (2) another\n"
    assert capsys.readouterr().err == expected
