"""Loading: every parameter filled exactly once, or an error that lists the names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill.checkpoint import open_checkpoint
from pagemill.errors import CheckpointError, UnknownNameError
from pagemill.models import MODELS
from pagemill.models.loader import build_meta_model, load_model
from tests.models.conftest import load
from tests.models.driver import generate
from tests.models.test_families import NUM_TOKENS, PROMPTS, assert_same
from tests.models.tiny import TINY, model_config, save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_pair, tmp_path) -> Path:
    """Return a copy of the saved tied Llama, to be spoiled."""
    return Path(shutil.copytree(tiny_pair("llama-tied")[0], tmp_path / "copy"))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a saved model; `change` gets and returns them by name."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def set_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


# ---------------------------------------------------------------- what does not fit


def test_missing_tensors_are_listed(folder) -> None:
    gone = "model.layers.1.self_attn.q_proj.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != gone})
    with pytest.raises(
        CheckpointError, match=r"missing: 1 \(layers\.1\.self_attn\.q_proj\.weight\)"
    ):
        load(folder)


def test_unknown_tensors_are_listed(folder) -> None:
    rewrite(folder, lambda tensors: {**tensors, "model.layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"unknown.*: 1 \(model\.layers\.0\.extra\.weight\)"):
        load(folder)


def test_a_bias_that_the_configuration_does_not_name_is_unknown(folder) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(48)})
    with pytest.raises(CheckpointError, match="q_proj.bias"):
        load(folder)


def test_layers_beyond_the_configured_number_are_unknown(folder) -> None:
    set_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"unknown.*: 9 \(model\.layers\.2"):
        load(folder)


def test_a_wrong_shape_is_listed_with_both_shapes(folder) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name][:-1]})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is \[79, 48\], needed \[80, 48\]"):
        load(folder)


def test_a_transposed_matrix_is_a_wrong_shape(folder) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].t()})
    with pytest.raises(CheckpointError, match=r"needed \[48, 80\]"):
        load(folder)


def test_a_tensor_under_two_names_is_listed_with_both(folder) -> None:
    name = "model.norm.weight"
    rewrite(folder, lambda tensors: {**tensors, "norm.weight": tensors[name].clone()})
    with pytest.raises(CheckpointError, match=r"there twice: 1 .*norm\.weight and .*norm\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32"), (torch.int64, "I64"),
        (torch.bool, "BOOL"), (torch.complex64, "C64"), (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)  # fmt: skip
def test_numbers_that_only_a_quantized_format_explains_are_no_weights(folder, dtype, word) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(
        CheckpointError, match=rf"wrong type: 1 \({name} is {word}, it holds no plain weights\)"
    ):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floating_weights_of_any_width_load(folder, dtype) -> None:
    rewrite(folder, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    load(folder)


def test_all_troubles_come_in_one_error(folder) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.norm.weight"]
        return {**tensors, "a.b": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(150, 48)}

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError, match=r"missing.*wrong shape.*unknown"):
        load(folder)


def test_many_names_are_cut_with_their_count(folder) -> None:
    rewrite(folder, lambda tensors: {"model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"missing: 28 \(.*and 16 more\)"):
        load(folder)


def test_a_truncated_file_is_refused_by_name(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load(folder)


# ---------------------------------------------------------------- shards


def test_sharded_files_give_the_same_tokens(tmp_path) -> None:
    theirs = save_tiny(TINY["llama"], tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(generate(load(tmp_path), PROMPTS, NUM_TOKENS), theirs)


def test_a_missing_shard_is_refused_by_name(tmp_path) -> None:
    save_tiny(TINY["llama"], tmp_path, max_shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load(tmp_path)


# ---------------------------------------------------------------- tied heads


def test_no_head_in_the_file_and_tied_by_the_configuration(folder) -> None:
    model = load(folder)
    assert model.head.weight is None
    logits = model.logits(torch.eye(48))
    assert torch.equal(logits, model.embedding.weight.t())


def test_no_head_in_the_file_and_not_tied_is_missing(folder) -> None:
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: 1 \(lm_head\.weight\)"):
        load(folder)


def test_an_absent_flag_means_the_default_of_the_family(tiny_pair, tmp_path, folder) -> None:
    set_config(folder, tie_word_embeddings="absent")
    with pytest.raises(CheckpointError, match="lm_head"):
        load(folder)
    for name in ("gpt2", "opt", "gemma2", "gemma3"):
        copy = Path(shutil.copytree(tiny_pair(name)[0], tmp_path / name))
        set_config(copy, tie_word_embeddings="absent")
        assert load(copy).head.weight is None


def test_an_equal_head_in_the_file_is_tied(folder) -> None:
    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    rewrite(folder, add)
    assert load(folder).head.weight is None


def test_a_differing_head_in_the_file_is_used_although_tied(folder, caplog) -> None:
    head = torch.randn(151, 48)
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": head})
    model = load(folder)
    assert torch.equal(model.logits(torch.eye(48)), head.t())
    assert "tie_word_embeddings" in caplog.text


def test_a_tied_file_may_hold_the_head_instead_of_the_embedding(folder, tiny_pair) -> None:
    def move(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embedding = tensors.pop("model.embed_tokens.weight")
        return {**tensors, "lm_head.weight": embedding}

    rewrite(folder, move)
    assert_same(generate(load(folder), PROMPTS, NUM_TOKENS), tiny_pair("llama-tied")[1])


def test_an_untied_head_is_its_own(tiny_pair) -> None:
    model = load(tiny_pair("llama")[0])
    assert model.head.weight is not None
    assert not torch.equal(model.head.weight, model.embedding.weight)


# ---------------------------------------------------------------- names


PREFIXES = {
    "llama": "model.",
    "gpt2": "transformer.",
    "opt": "model.",
    "gpt_neox": "gpt_neox.",
    "gemma3": "model.",
}


@pytest.mark.parametrize("name", PREFIXES)
def test_names_without_prefix_load_too(name, tiny_pair, tmp_path) -> None:
    folder, theirs = tiny_pair(name)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    prefix = PREFIXES[name]
    rewrite(copy, lambda tensors: {n.removeprefix(prefix): t for n, t in tensors.items()})
    assert_same(generate(load(copy), PROMPTS, NUM_TOKENS), theirs)


@pytest.mark.parametrize(
    ("name", "harmless"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.2.attn.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
        ("gemma3", "vision_tower.encoder.weight"),
    ],
)
def test_known_harmless_tensors_are_passed_over(name, harmless, tiny_pair, tmp_path) -> None:
    folder, theirs = tiny_pair(name)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    rewrite(copy, lambda tensors: {**tensors, harmless: torch.zeros(3)})
    assert_same(generate(load(copy), PROMPTS, NUM_TOKENS), theirs)


def test_older_gpt_neox_files_call_the_head_embed_out(tiny_pair, tmp_path) -> None:
    folder, theirs = tiny_pair("gpt_neox")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    rewrite(copy, lambda t: {n.replace("lm_head", "embed_out"): x for n, x in t.items()})
    assert_same(generate(load(copy), PROMPTS, NUM_TOKENS), theirs)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_decoder_inside_a_gemma3_with_pictures(prefix, tiny_pair, tmp_path) -> None:
    folder, theirs = tiny_pair("gemma3")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    rewrite(copy, lambda t: {n.replace("model.", prefix, 1): x for n, x in t.items()})
    text = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert_same(generate(load(copy), PROMPTS, NUM_TOKENS), theirs)


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    config = {"model_type": "llama", **TINY["llama"].sizes}
    with pytest.raises(UnknownNameError, match=r"'mamba'.*gemma2, gemma3.*qwen3"):
        build_meta_model(model_config(config, model_type="mamba", shape=None))


# ---------------------------------------------------------------- how it is loaded


@pytest.mark.parametrize("name", TINY)
def test_the_names_of_every_family_cover_every_parameter_once(name, tiny_pair) -> None:
    """Targets of the whole name map: as many elements as there are parameters, none twice."""
    model = load(tiny_pair(name)[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for target in model.expected_tensors().values():
            target.view.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_the_model_is_ready_to_run(tiny_pair) -> None:
    model = load(tiny_pair("llama")[0], dtype="bfloat16")
    assert not model.training
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())


def test_bfloat16_logits_are_float32_and_near_transformers(tiny_pair) -> None:
    folder, theirs = tiny_pair("llama-tied")
    model = load(folder, dtype="bfloat16")
    hidden = torch.randn(3, 48).to(torch.bfloat16)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.float() @ theirs.lm_head.weight.t()
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.02)


def test_weights_of_another_dtype_are_cast(folder) -> None:
    rewrite(folder, lambda tensors: {name: t.to(torch.float16) for name, t in tensors.items()})
    assert {p.dtype for p in load(folder).parameters()} == {torch.float32}


def test_dummy_weights_need_no_files_and_are_the_same_every_time() -> None:
    for name, tiny in TINY.items():
        hf_config = {"model_type": _model_type(name), **tiny.sizes}
        config = model_config(hf_config, load_format="dummy")
        first, second = (load_model(config, device=CPU, checkpoint=None) for _ in range(2))
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other)
            assert one.isfinite().all()
        [run] = generate(first, [PROMPTS[2]], 3)
        assert all(value == value for value in run.logprobs)


def test_dummy_weights_of_neighbouring_rows_differ() -> None:
    config = model_config({"model_type": "llama", **TINY["llama"].sizes}, load_format="dummy")
    weight = load_model(config, device=CPU, checkpoint=None).embedding.weight
    assert len({tuple(row.tolist()) for row in weight}) == len(weight)


def test_a_meta_model_has_the_parameters_of_the_loaded_one(tiny_pair) -> None:
    for name in TINY:
        folder = tiny_pair(name)[0]
        model = load(folder)
        meta = build_meta_model(model_config(open_checkpoint(folder).config))
        assert {p.device.type for p in meta.parameters()} == {"meta"}
        assert [(n, p.shape, p.dtype) for n, p in meta.named_parameters()] == [
            (n, p.shape, p.dtype) for n, p in model.named_parameters()
        ]
        assert meta.attention_specs == model.attention_specs


def test_every_registered_architecture_can_be_imported() -> None:
    for name in MODELS:
        assert callable(MODELS.load(name).read_shape)


def _model_type(name: str) -> str:
    plain = name.split("-")[0]
    return "gemma3_text" if plain == "gemma3" else plain
