"""tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from pagemill.errors import CheckpointError, ConfigError
from pagemill.tokenizer import load_tokenizer
from pagemill.tokenizer.fast import FastTokenizer

VOCAB = {"a": 0, "b": 1, "<unk>": 2}


def _write(
    folder: Path, config: dict[str, Any] | None = None, *, frame: str | None = None, **files: Any
) -> FastTokenizer:
    """Write a small tokenizer with `<s>` (3) and `</s>` (4) into `folder` and load it."""
    backend = Tokenizer(models.BPE(vocab=VOCAB, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if frame is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=[("<s>", 3), ("</s>", 4)]
        )
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FastTokenizer)
    return loaded


NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    tokenizer = _write(tmp_path, NAMED)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (3, 4)


def test_special_tokens_map_fills_in_and_null_takes_away(tmp_path: Path) -> None:
    tokenizer = _write(tmp_path, {"bos_token": None}, special_tokens_map=NAMED)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 4)


@pytest.mark.parametrize("frame", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_add_flags_win_over_the_post_processor(
    tmp_path: Path, frame: str | None, add_bos: bool | None, add_eos: bool | None
) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    tokenizer = _write(tmp_path, {**NAMED, **flags}, frame=frame)
    bos = "<s>" in (frame or "") if add_bos is None else add_bos
    eos = "</s>" in (frame or "") if add_eos is None else add_eos
    assert tokenizer.encode("ab") == [*([3] if bos else []), 0, 1, *([4] if eos else [])]
    assert tokenizer.adds_bos is bos


def test_a_bare_tokenizer_json_names_its_begin_token_itself(tmp_path: Path) -> None:
    tokenizer = _write(tmp_path, frame="<s> $A")
    assert tokenizer.adds_bos
    assert tokenizer.encode("<s>a") == [3, 0]
    by_file = load_tokenizer(tmp_path / "tokenizer.json")
    assert by_file.encode("<s>a") == [3, 0]


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    declared = {
        "5": {"content": "<tool>", "special": False, "normalized": False, "lstrip": False},
        "6": {"content": "<end>", "special": True, "normalized": False, "rstrip": False},
    }
    config = {"added_tokens_decoder": declared, "additional_special_tokens": ["<x>"], **NAMED}
    tokenizer = _write(tmp_path, config)
    assert tokenizer.encode("a<tool><end><x>") == [0, 5, 6, 7]
    assert tokenizer.special_token_ids == {3, 4, 6, 7}
    assert tokenizer.decode([0, 5, 6, 7]) == "a<tool>"


def test_declared_id_that_the_vocabulary_cannot_give_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, {"added_tokens_decoder": {"90": {"content": "<far>", "special": True}}})
    assert "'<far>' the id 90, but the vocabulary makes it 5" in caplog.text


def test_token_named_special_is_special_though_the_vocabulary_does_not_say(tmp_path: Path) -> None:
    tokenizer = _write(tmp_path, {**NAMED, "unk_token": "<unk>"})
    assert tokenizer.special_token_ids == {2, 3, 4}


def test_chat_template_as_text_or_named_list(tmp_path: Path) -> None:
    assert _write(tmp_path, {"chat_template": "plain"}).chat_template == "plain"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = _write(tmp_path, {"chat_template": named})
    assert tokenizer.chat_template == "d"
    messages = [{"role": "user", "content": ""}]
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "t"


def test_chat_template_files_win_over_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "old"}
    assert _write(tmp_path, config, chat_template={"chat_template": "j"}).chat_template == "j"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("rag")
    tokenizer = _write(tmp_path, config)
    assert tokenizer.chat_template == "file é"
    assert tokenizer.apply_chat_template([{"role": "user"}], chat_template="rag") == "rag"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer_config.json", '{"a": 1,\n  oops}', "line 2, column 3"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "not shaped as one"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}', "KeyError: 'content'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "not shaped as one"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "KeyError: 'template'"),
        ("special_tokens_map.json", "", "not valid JSON"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer.json", "", "cannot be read as a tokenizer"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    _write(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert file in str(caught.value)


def test_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is not UTF-8: .* at byte 2"):
        load_tokenizer(tmp_path)


def test_missing_path_and_unknown_mode_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="tokenizer_mode is 'quick'; it is one of auto, slow"):
        load_tokenizer(tmp_path, mode="quick")


def _spoil(folder: Path, **sections: Any) -> None:
    """Replace sections of a saved tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sections}))


def test_a_file_that_makes_the_library_panic_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path, NAMED)
    unknown = {"SpecialToken": {"id": "<none>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    _spoil(
        tmp_path,
        post_processor={
            "type": "TemplateProcessing", "single": [unknown, text], "pair": [], "special_tokens": {},
        },
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"tokenizer\.json makes the tokenizers library fail"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("first", [[], [{"type": "Fuse"}]])
def test_a_strip_at_the_end_is_refused_as_the_library_panics_on_short_texts(
    tmp_path: Path, first: list[Any]
) -> None:
    _write(tmp_path, NAMED)
    strip = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    _spoil(tmp_path, decoder={"type": "Sequence", "decoders": [*first, strip]})
    with pytest.raises(CheckpointError, match="strips 1 characters 'a' from the end"):
        load_tokenizer(tmp_path)
