"""`pagemill generate`: prompts from arguments and stdin, text and JSON, failures in one line."""

from __future__ import annotations

import io
import json

import pytest

from pagemill.cli import main


def test_prints_prompt_and_text_for_each_prompt(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", tiny_llama, "--max-tokens", "5", "--temperature", "0", *small]
    assert main(["generate", "abc", "xyz", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("abc")
    assert "\nxyz" in out
    assert main(["generate", "abc", *words]) == 0
    assert out.startswith(capsys.readouterr().out)


def test_json_has_one_object_a_prompt_with_every_sample(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", tiny_llama, "--max-tokens", "4", "--n", "2", "--sampling-seed", "9"]
    assert main(["generate", "a", "b", "--json", *words, *small]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert [choice["index"] for choice in rows[0]["outputs"]] == [0, 1]
    assert {choice["seed"] for choice in rows[0]["outputs"]} == {9}
    assert rows[0]["outputs"][0]["num_tokens"] == 4


def test_without_max_tokens_the_answer_goes_to_the_end_of_the_context(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", tiny_llama, "--max-model-len", "40", "--temperature", "0"]
    assert main(["generate", "abcd", "--json", *words, *small]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (choice["num_tokens"], choice["finish_reason"]) == (36, "length")


def test_prompt_from_stdin(
    tiny_llama: str,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    words = ["--model", tiny_llama, "--max-tokens", "2", "--json", *small]
    assert main(["generate", *words]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "from a pipe"


def test_empty_stdin_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", "--model", "no/such-model"]) == 1
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "7"], "top_p"),
        (["--max-tokens", "-2"], "max_tokens"),
        (["--block-size", "3"], "block_size"),
        (["--dtype", "float16"], "float16"),
    ],
)
def test_bad_value_is_one_line_that_names_it(
    tiny_llama: str,
    small: list[str],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "x", "--model", tiny_llama, *small, *words]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert said in errors[0]


def test_unknown_model_says_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", "./not/there"]) == 1
    err = capsys.readouterr().err
    assert "./not/there" in err
    assert "Traceback" not in err


def test_speculation_is_a_flag_and_changes_no_text(
    tiny_llama: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", tiny_llama, "--max-tokens", "30", "--temperature", "0", *small]
    assert main(["generate", "abcabcabc", *words]) == 0
    plain = capsys.readouterr().out
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    assert main(["generate", "abcabcabc", *words, "--speculative-config", json.dumps(config)]) == 0
    assert capsys.readouterr().out == plain
    bad = json.dumps({"method": "ngram", "num_speculative_tokens": -1})
    assert main(["generate", "abc", *words, "--speculative-config", bad]) == 1
    assert "num_speculative_tokens is -1" in capsys.readouterr().err
