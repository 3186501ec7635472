"""`speculative_config`: what it means, and what is said about one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagemill.engine.resolve import resolve
from pagemill.engine.speculation import read_speculative_config
from pagemill.engine_args import EngineArgs
from pagemill.errors import CheckpointError, ConfigError, UnknownNameError
from tests.engine.test_resolve import changed
from tests.fakes.fake_model import save_tiny_llama

NGRAM = {"method": "ngram"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=512)


def test_off_is_none() -> None:
    assert read_speculative_config(None) is None


def test_ngram_has_the_sizes_that_are_given_and_defaults_for_the_rest() -> None:
    settings = read_speculative_config(
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    )
    assert settings is not None
    config = settings.config
    assert (config.num_speculative_tokens, config.adaptive_length) == (3, True)
    assert config.options == {"prompt_lookup_min": 2, "prompt_lookup_max": 2}
    largest = read_speculative_config({**NGRAM, "prompt_lookup_max": 4})
    assert largest is not None
    assert largest.config.options == {"prompt_lookup_min": 4, "prompt_lookup_max": 4}
    default = read_speculative_config(NGRAM)
    assert default is not None and default.config.num_speculative_tokens == 8


@pytest.mark.parametrize("raw", [{"model": "[ngram]"}, {"model": "ngram", "method": "ngram"}])
def test_the_model_ngram_is_the_method(raw: dict[str, Any]) -> None:
    settings = read_speculative_config(raw)
    assert settings is not None and settings.config.method == "ngram"


def test_a_model_alone_is_a_draft_model(folder: Path) -> None:
    config = resolve(EngineArgs(str(folder), speculative_config={"model": str(folder)}))
    assert config.speculative is not None and config.speculative.draft_model is not None
    assert config.speculative.method == "draft_model"
    assert config.speculative.draft_model.path == str(folder)
    assert any("draft model = " in note for note in config.notes)
    assert any("speculative_config = draft_model: at most 4" in note for note in config.notes)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (3, r"speculative_config is 3; it must be a dict"),
        ({}, "names no method .method is None.; known: .*ngram"),
        ({"method": 7}, "names no method .method is 7."),
        ({**NGRAM, "num_speculative_tokens": -1}, "num_speculative_tokens is -1; .* from 1 to 64"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({**NGRAM, "num_speculative_tokens": 65}, "num_speculative_tokens is 65"),
        ({**NGRAM, "num_speculative_tokens": "4"}, "num_speculative_tokens is '4'"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "adaptive_length": 1}, "adaptive_length is 1; it must be True or False"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min is 0; .* from 1 to 64"),
        ({**NGRAM, "prompt_lookup_max": 2.5}, "prompt_lookup_max is 2.5"),
        (
            {**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min 5 and prompt_lookup_max 3; lower",
        ),
        (
            {"model": "m", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size is 2; it must be 1",
        ),
        (
            {**NGRAM, "prompt_lookup": 3},
            "the key 'prompt_lookup', .* did you mean 'prompt_lookup_m",
        ),
        ({**NGRAM, "model": "x"}, "the key 'model', which method 'ngram' does not know"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "prob is 1.5; .* from 0 to 1",
        ),
        ({"method": "suffix", "suffix_max_cached_tokens": -5}, "suffix_max_cached_tokens is -5"),
        ({"method": "draft_model"}, "has method 'draft_model' and model None; give"),
        ({"method": "draft_model", "model": "a\0b"}, "model is 'a.*'; it must be a path"),
        ({"model": ""}, "and model ''; give"),
        ({"model": "x", "quantization": 4}, "quantization is 4; it must be a string"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(raw: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_speculative_config(raw)


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'medusa'; known: draft_model, ngram, suffix"):
        read_speculative_config({"method": "medusa"})


def test_a_draft_model_that_is_not_there_says_where_it_was_looked_for(folder: Path) -> None:
    with pytest.raises((ConfigError, CheckpointError), match="no-such-draft"):
        resolve(EngineArgs(str(folder), speculative_config={"model": "no-such-draft"}))


def test_a_draft_model_with_another_number_of_tokens_is_refused_with_both(
    folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "other", vocab_size=300)
    weights = load_file(other / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding.repeat(2, 1)[:300].clone()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ConfigError, match="a vocabulary of 300 tokens, the model .* one of 260"):
        resolve(EngineArgs(str(folder), speculative_config={"model": str(other)}))


def test_a_draft_model_whose_tokens_mean_something_else_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"2 of 260 token ids .* \(97, 98, ...\)"):
        resolve(EngineArgs(str(folder), speculative_config={"model": str(other)}))
