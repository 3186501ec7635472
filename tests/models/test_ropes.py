"""Every kind of rotary scaling through a whole model, and every spelling of its settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError
from pagemill.models.loader import build_meta_model, load_model
from tests.models.conftest import load, save_and_load
from tests.models.driver import generate
from tests.models.test_families import NUM_TOKENS, PROMPTS, assert_same
from tests.models.tiny import TINY, Tiny, model_config, save_tiny

_BASE = TINY["llama-tied"].sizes

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    # The context is the original one: transformers then takes the short factors, as pagemill does.
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": 128,
        "factor": 2.0,
    },
}


def _tiny(kind: str) -> Tiny:
    settings = {"rope_type": kind, "rope_theta": 100.0, **KINDS[kind]}
    return Tiny("LlamaConfig", {**_BASE, "rope_parameters": settings}, embedding_scale=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_equal_transformers(kind, tmp_path) -> None:
    model, theirs = save_and_load(_tiny(kind), tmp_path)
    assert_same(generate(model, PROMPTS, NUM_TOKENS), theirs)


def _spelled(kind: str, spelling: str) -> dict[str, Any]:
    """Return the rotary keys of config.json in one spelling."""
    settings = KINDS[kind]
    return {
        "rope_parameters": {
            "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **settings}
        },
        "rope_parameters with type": {
            "rope_parameters": {"type": kind, "rope_theta": 100.0, **settings}
        },
        "rope_scaling with rope_type": {
            "rope_theta": 100.0,
            "rope_scaling": {"rope_type": kind, **settings},
        },
        "rope_scaling with type": {"rope_theta": 100, "rope_scaling": {"type": kind, **settings}},
    }[spelling]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spelling",
    ["rope_parameters with type", "rope_scaling with rope_type", "rope_scaling with type"],
)
def test_every_spelling_gives_the_same_tokens(kind, spelling, tmp_path) -> None:
    save_tiny(_tiny(kind), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    made = []
    for keys in (_spelled(kind, "rope_parameters"), _spelled(kind, spelling)):
        path.write_text(json.dumps({**config, **keys}))
        made.append([(r.new_ids, r.logprobs) for r in generate(load(tmp_path), PROMPTS[2:4], 8)])
    assert made[0] == made[1]


def test_a_null_rope_scaling_is_the_default_kind(tmp_path) -> None:
    theirs = save_tiny(_tiny("default"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_scaling": None, "rope_theta": 100.0}))
    assert_same(generate(load(tmp_path), PROMPTS, NUM_TOKENS), theirs)


def test_an_unknown_kind_is_an_error_that_names_it() -> None:
    config = {"model_type": "llama", **_BASE, "rope_scaling": {"type": "spiral", "factor": 2.0}}
    with pytest.raises(CheckpointError, match=r"'spiral'.*known: default, dynamic, linear"):
        build_meta_model(model_config(config))


def test_older_gemma3_files_name_their_two_bases_beside_each_other(tiny_pair, tmp_path) -> None:
    folder, theirs = tiny_pair("gemma3")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    old = {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    checkpoint = open_checkpoint(folder)
    model = load_model(
        model_config({**config, **old}), device=torch.device("cpu"), checkpoint=checkpoint
    )
    assert_same(generate(model, PROMPTS, NUM_TOKENS), theirs)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_older_phi3_files_call_longrope_by_other_names(kind, tiny_pair) -> None:
    folder, theirs = tiny_pair("phi3")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("rope_parameters")
    old = {
        "rope_theta": settings["rope_theta"],
        "partial_rotary_factor": settings["partial_rotary_factor"],
        "rope_scaling": {
            "type": kind,
            "short_factor": settings["short_factor"],
            "long_factor": settings["long_factor"],
        },
    }
    checkpoint = open_checkpoint(folder)
    model = load_model(
        model_config({**config, **old}), device=torch.device("cpu"), checkpoint=checkpoint
    )
    assert_same(generate(model, PROMPTS, NUM_TOKENS), theirs)


def test_older_gpt_neox_files_name_share_and_base_their_own_way(tiny_pair) -> None:
    folder, theirs = tiny_pair("gpt_neox")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("rope_parameters")
    old = {
        "rotary_emb_base": settings["rope_theta"],
        "rotary_pct": settings["partial_rotary_factor"],
    }
    checkpoint = open_checkpoint(folder)
    model = load_model(
        model_config({**config, **old}), device=torch.device("cpu"), checkpoint=checkpoint
    )
    assert_same(generate(model, PROMPTS, NUM_TOKENS), theirs)


def test_longrope_takes_the_long_factors_by_max_model_len_alone(tmp_path) -> None:
    """A sequence over the original context: transformers takes the long factors then, too."""
    settings = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        **KINDS["longrope"],
        "original_max_position_embeddings": 16,
    }
    model, theirs = save_and_load(
        Tiny("LlamaConfig", {**_BASE, "rope_parameters": settings}, embedding_scale=0.15), tmp_path
    )
    prompt = PROMPTS[-1]
    [run] = generate(model, [prompt], NUM_TOKENS, chunk=7)
    with torch.no_grad():
        rows = theirs(torch.tensor([run.token_ids[:-1]]), use_cache=False).logits[0]
    assert run.new_ids == rows[len(prompt) - 1 :].argmax(-1).tolist()
