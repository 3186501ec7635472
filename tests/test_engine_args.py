"""The one flat list of engine arguments."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from pagemill.engine_args import AsyncEngineArgs, EngineArgs
from pagemill.errors import NotSupportedError


def test_every_argument_says_what_it_is_for() -> None:
    for f in dataclasses.fields(EngineArgs):
        assert f.metadata["group"], f.name
        assert f.metadata["help"], f.name


def test_an_unknown_keyword_names_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match="'gpu_memory_utilisation'.*'gpu_memory_utilization'"):
        EngineArgs.from_keywords({"gpu_memory_utilisation": 0.5})
    assert AsyncEngineArgs.from_keywords({"seed": 3}).seed == 3


def test_the_defaults_ask_for_nothing_that_is_not_there() -> None:
    EngineArgs().refuse_unsupported()


def test_every_refusal_names_the_argument_the_value_and_the_default() -> None:
    refused = [f for f in dataclasses.fields(EngineArgs) if f.metadata["unsupported"]]
    assert refused
    for f in refused:
        with pytest.raises(NotSupportedError, match=f.name) as caught:
            EngineArgs(**{f.name: "something"}).refuse_unsupported()
        assert "'something'" in str(caught.value)
        assert repr(f.default) in str(caught.value)


def test_arguments_accepted_for_other_engines_scripts_change_nothing() -> None:
    EngineArgs(
        disable_custom_all_reduce=True, max_context_len_to_capture=8192, enforce_eager=True,
        enable_chunked_prefill=True,
    ).refuse_unsupported()  # fmt: skip


def test_two_lists_do_not_share_their_containers() -> None:
    EngineArgs().hf_overrides["x"] = 1
    assert EngineArgs().hf_overrides == {}


def own_parser(*, group: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine") if group else parser)
    parser.set_defaults(model="folder")
    parser.add_argument("--max-tokens", type=int, default=5)
    return parser


@pytest.mark.parametrize("group", [False, True])
def test_a_program_s_own_parser_takes_the_engine_s_flags(group: bool) -> None:
    parser = own_parser(group=group)
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs(model="folder")
    words = ["--max-model-len", "64", "--kv-cache-memory-bytes", "2MiB", "--no-debug"]
    args = parser.parse_args([*words, "--enforce-eager", "--hf-overrides", '{"a": 1}'])
    wanted = EngineArgs(
        "folder", max_model_len=64, kv_cache_memory_bytes=2 << 20, enforce_eager=True,
        hf_overrides={"a": 1},
    )  # fmt: skip
    assert EngineArgs.from_cli_args(args) == wanted
    # ... and all that is left is keywords of LLM
    keywords = vars(args)
    assert keywords.pop("max_tokens") == 5
    assert EngineArgs.from_keywords(keywords) == wanted
    made = AsyncEngineArgs.from_cli_args(parser.parse_args([]))
    assert isinstance(made, AsyncEngineArgs)


def test_a_wrong_value_of_a_flag_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        own_parser(group=False).parse_args(["--max-model-len", "many"])
    assert "--max-model-len is 'many'" in capsys.readouterr().err
