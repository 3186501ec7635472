"""Flags, environment, YAML file and defaults become dataclasses, with errors that name the argument."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pagemill.cli import arguments
from pagemill.engine_args import DEMO_MODEL, EngineArgs
from pagemill.errors import ConfigError
from pagemill.server.settings import ServerArgs


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    arguments.add_model(parser)
    arguments.add_fields(parser, EngineArgs, ServerArgs)
    return parser.parse_args(words)


def settle(words: list[str]) -> EngineArgs:
    made = arguments.settle_all(parse(words), EngineArgs, ServerArgs)[0]
    assert isinstance(made, EngineArgs)
    return made


@pytest.fixture(autouse=True)
def no_pagemill_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for f in (*dataclasses.fields(EngineArgs), *dataclasses.fields(ServerArgs)):
        monkeypatch.delenv(f"PAGEMILL_{f.name.upper()}", raising=False)


def test_without_flags_every_field_has_its_default() -> None:
    assert settle([]) == EngineArgs()
    assert settle([]).model == DEMO_MODEL


def test_every_field_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_model(parser)
    arguments.add_fields(parser, EngineArgs, ServerArgs)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for f in (*dataclasses.fields(EngineArgs), *dataclasses.fields(ServerArgs)):
        assert "--" + f.name.replace("_", "-") in flags


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-model-len", "512"], "max_model_len", 512),
        (["--gpu-memory-utilization", "0.25"], "gpu_memory_utilization", 0.25),
        (["--debug"], "debug", True),
        (["--no-debug"], "debug", False),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill", False),
        (["--hf-overrides", '{"a": {"b": 1}}'], "hf_overrides", {"a": {"b": 1}}),
        (["--kv-cache-memory-bytes", "2GiB"], "kv_cache_memory_bytes", 2 * 2**30),
        (["--kv-cache-memory-bytes", "1.5gib"], "kv_cache_memory_bytes", 3 * 2**29),
        (["--logits-processors", "a:b", "c:d"], "logits_processors", ["a:b", "c:d"]),
        (["--dtype", "float32"], "dtype", "float32"),
        (["some/model"], "model", "some/model"),
        (["--model", "some/model"], "model", "some/model"),
    ],
)
def test_flag_becomes_the_field_value(words: list[str], name: str, value: Any) -> None:
    assert getattr(settle(words), name) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "many"], "whole number"),
        (["--gpu-memory-utilization", "half"], "number"),
        (["--hf-overrides", "[1]"], "JSON object"),
        (["--hf-overrides", "{"], "JSON object"),
        (["--kv-cache-memory-bytes", "2 elephants"], "no size"),
        (["--dtype", "int3"], "invalid choice"),
    ],
)
def test_wrong_flag_value_says_what_is_wanted(words: list[str], said: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=said):
        parse(words)


def test_model_given_twice_differently_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one"):
        settle(["one", "--model", "two"])


def test_flag_wins_over_environment_over_yaml_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 3\nmax_model_len: 30\nblock-size: 8\n")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("PAGEMILL_MAX_MODEL_LEN", "20")
    args = settle(["--config", str(file), "--max-num-seqs", "1"])
    assert (args.max_num_seqs, args.max_model_len, args.block_size) == (1, 20, 8)


def test_yaml_file_holds_engine_and_server_fields_of_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nport: 9\nkv-cache-memory-bytes: 1MiB\ndebug: true\ngpu_memory_utilization: 1\n"
        "hf-overrides: {a: 1}\nallowed-origins: [x, y]\nseed: null\n"
    )
    engine, server = arguments.settle_all(parse(["--config", str(file)]), EngineArgs, ServerArgs)
    assert (engine.model, engine.kv_cache_memory_bytes, engine.debug) == ("m", 2**20, True)
    assert engine.gpu_memory_utilization == 1.0
    assert engine.hf_overrides == {"a": 1}
    assert (server.port, server.allowed_origins) == (9, ["x", "y"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-model-lem: 5", "max_model_len"),
        ("max-model-len: [5]", "whole number"),
        ("max-model-len: true", "whole number"),
        ("debug: 1", "true or false"),
        ("dtype: int3", "choose from"),
        ("a: [", "not valid YAML"),
        ("- 5", "mapping"),
        ("port: 5\nPort: 6", "Port"),
        ("max-model-len: 5\nmax_model_len: 6", "twice"),
    ],
)
def test_wrong_yaml_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        settle(["--config", str(file)])


def test_missing_yaml_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        settle(["--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DEBUG", "yes", True),
        ("DEBUG", "0", False),
        ("SEED", "7", 7),
        ("HF_OVERRIDES", '{"a": 1}', {"a": 1}),
        ("LOGITS_PROCESSORS", "a:b,c:d", ["a:b", "c:d"]),
        ("MODEL", "elsewhere", "elsewhere"),
    ],
)
def test_environment_gives_defaults(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"PAGEMILL_{name}", text)
    assert getattr(settle([]), name.lower()) == value


@pytest.mark.parametrize(("name", "text"), [("SEED", "x"), ("DEBUG", "maybe"), ("DTYPE", "int3")])
def test_wrong_environment_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"PAGEMILL_{name}", text)
    with pytest.raises(ConfigError, match=f"(?i){name}.*{text}"):
        settle([])


@pytest.mark.parametrize(
    "args",
    [
        ServerArgs(port=70000),
        ServerArgs(port=-1),
        ServerArgs(max_body_bytes=0),
        ServerArgs(ssl_keyfile="k"),
        ServerArgs(api_key=["a", ""]),
    ],
)
def test_impossible_server_arguments_are_refused(args: ServerArgs) -> None:
    with pytest.raises(ConfigError):
        args.check()


def test_variable_that_nothing_reads_is_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMILL_MAX_MODEL_LENGTH", "5")
    monkeypatch.setenv("PAGEMILL_PORT", "0")  # of another command
    monkeypatch.setenv("PAGEMILL_CACHE", "/somewhere")
    monkeypatch.setenv("PAGEMILL_LOG_LEVEL", "INFO")
    parser = argparse.ArgumentParser()
    arguments.add_fields(parser, EngineArgs)
    assert arguments.settle(parser.parse_args([]), EngineArgs) == EngineArgs()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "PAGEMILL_MAX_MODEL_LENGTH" in said[0]
    assert said[0].endswith("did you mean PAGEMILL_MAX_MODEL_LEN?")
