"""Rules that hold whatever a tokenizer was made from."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pagemill.errors import CheckpointError, RequestError
from pagemill.tokenizer.decoding import byte_level_alphabet
from pagemill.tokenizer.fast import LONG, FastTokenizer, TokenizerSettings

BOS, EOS = 256, 257


def _backend(*, frame: bool = True) -> Tokenizer:
    """Bytes, `<s>` and `</s>`; the first is put ahead of every text."""
    backend = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if frame:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return backend


def _tokenizer(*, frame: bool = True, templates: Mapping[str, str] | None = None) -> FastTokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    settings = TokenizerSettings("a test", special, templates or {})
    return FastTokenizer(_backend(frame=frame), settings)


def test_begin_token_comes_once() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.adds_bos
    assert tokenizer.encode("a") == tokenizer.encode("<s>a") == [BOS, ord("a")]


def test_begin_tokens_that_the_text_repeats_are_the_texts_own() -> None:
    assert _tokenizer().encode("<s><s>a") == [BOS, BOS, ord("a")]
    assert _tokenizer().encode("a<s>") == [BOS, ord("a"), BOS]


def test_no_begin_token_without_special_tokens() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [BOS, ord("a")]


def test_empty_text_is_the_begin_token_alone_or_nothing() -> None:
    assert _tokenizer().encode("") == [BOS]
    unframed = _tokenizer(frame=False)
    assert not unframed.adds_bos
    assert unframed.encode("") == []


def test_rendered_chat_has_one_begin_token_on_every_route() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for frame in (True, False):
        tokenizer = _tokenizer(frame=frame, templates={"default": template})
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        assert text == "<s>a"
        routes = [tokenizer.encode(text, add_special_tokens=flag) for flag in (True, False)]
        assert routes == [[BOS, ord("a")]] * 2


def test_length_limits_of_the_file_cut_and_pad_nothing() -> None:
    backend = _backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = FastTokenizer(backend, TokenizerSettings("a test", {"bos_token": "<s>"}))
    assert tokenizer.encode("abcdefghij") == [BOS, *b"abcdefghij"]
    assert tokenizer.encode("a") == [BOS, ord("a")]


def test_lone_surrogate_is_a_request_error_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 2") as caught:
        _tokenizer().encode("ab\ud800")
    assert caught.value.param == "prompt"


def test_vocab_size_counts_past_holes() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    tokenizer = FastTokenizer(backend, TokenizerSettings("a test"))
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 3, 7]) == "a b"
    assert tokenizer.token_bytes(3) == b""


def test_special_ids_and_names() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.special_token_ids == {BOS, EOS}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert tokenizer.token_to_id("</s>") == EOS
    assert tokenizer.token_to_id("nothing") is None
    assert tokenizer.token_text(EOS) == "</s>"
    bare = FastTokenizer(_backend(), TokenizerSettings("a test"))
    assert (bare.bos_token_id, bare.eos_token_id, bare.chat_template) == (None, None, None)


def test_spaces_between_special_tokens_change_nothing() -> None:
    tokenizer = _tokenizer()
    ids = [BOS, ord("a"), EOS, EOS]
    for flag in (True, False):
        text = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=flag)
        assert text == "<s>a</s></s>"


def test_threads_share_a_tokenizer() -> None:
    tokenizer = _tokenizer()
    texts = [f"text {n} é" * 20 for n in range(200)]

    def roundtrip(text: str) -> str:
        decoder = tokenizer.decoder()
        pieces = [p for token_id in tokenizer.encode(text) for p in decoder.push(token_id)]
        return "".join(p.text for p in [*pieces, *decoder.flush()] if not p.hidden)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(roundtrip, texts)) == texts


MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def test_missing_chat_template_says_how_to_give_one() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        _tokenizer().apply_chat_template(MESSAGES)
    with pytest.raises(RequestError, match="templates named rag, tool_use"):
        _tokenizer(templates={"rag": "r", "tool_use": "t"}).apply_chat_template(MESSAGES)


def test_tools_choose_the_tool_template_and_names_choose_any() -> None:
    tokenizer = _tokenizer(templates={"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="rag") == "rag"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="{{ messages|length }}") == "1"


def test_variables_and_special_tokens_reach_the_template() -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ documents }}{{ tools }}"
    tokenizer = _tokenizer(templates={"default": template})
    rendered = tokenizer.apply_chat_template(MESSAGES, enable_thinking=False)
    assert rendered == "<s></s>FalseNoneNone"


@pytest.mark.parametrize("length", [LONG - 1, LONG, LONG + 1, 3 * LONG])
def test_long_texts_follow_the_rules_of_short_ones(length: int) -> None:
    tokenizer = _tokenizer()
    text = ("a</s>é" * length)[:length]
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.encode("<s>" + text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.decode(ids) == text.replace("</s>", "")
    with pytest.raises(RequestError, match=f"U\\+D800 at character {length}"):
        tokenizer.encode(text + "\ud800")
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary"):
            tokenizer.decode([*ids, wrong])


def test_other_threads_run_while_a_long_text_is_encoded_or_decoded() -> None:
    tokenizer = _tokenizer()
    text = "word " * 200_000
    ids = [ord("w")] * 2_000_000
    works: list[Callable[[], object]] = [
        lambda: tokenizer.encode(text),
        lambda: tokenizer.decode(ids),
    ]
    for work in works:
        ended = threading.Event()
        ticks: list[bool] = []

        def tick(ended: threading.Event = ended, ticks: list[bool] = ticks) -> None:
            while not ended.wait(0.002):
                ticks.append(True)

        ticker = threading.Thread(target=tick)
        ticker.start()
        work()
        ended.set()
        ticker.join()
        assert len(ticks) > 10


def test_a_panic_of_the_library_is_an_error_of_the_request_that_it_was_asked_for() -> None:
    tokenizer = _tokenizer()
    told = json.loads(_backend().to_str())
    told["post_processor"]["single"][0]["SpecialToken"]["id"] = "<gone>"
    tokenizer.backend.post_processor = Tokenizer.from_str(json.dumps(told)).post_processor
    for text in ("a", "a" * (LONG + 1)):
        with pytest.raises(RequestError, match="the tokenizers library fails on it") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())

    backend = _backend()
    backend.decoder = decoders.CTC()  # one whose text is made as a whole
    tokenizer = FastTokenizer(backend, TokenizerSettings("a test"))
    tokenizer.backend.decoder = decoders.Strip("a", 0, 2)  # panics on a text of one a
    decoder = tokenizer.decoder()
    decoder.push(ord("a"))
    for decode in (
        lambda: tokenizer.decode([ord("a")]),
        lambda: tokenizer.decode([ord("a")] * (LONG + 1)),
        decoder.flush,
    ):
        with pytest.raises(CheckpointError, match="tokenizer of a test .*library fails on them"):
            decode()
    assert tokenizer.decode([ord("b")]) == "b"
