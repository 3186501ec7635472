"""A tokenizer from tokenizer.json and the small files beside it.

tokenizer_config.json and special_tokens_map.json name the special tokens; chat templates come from
chat_template.jinja, additional_chat_templates/NAME.jinja, chat_template.json or tokenizer_config.json,
the first that has one winning. Called by `load_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.errors import CheckpointError, PagemillError
from pagemill.log import get_logger
from pagemill.tokenizer.fast import FastTokenizer, TokenizerSettings
from pagemill.tokenizer.library_panics import panics_as_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = get_logger(__name__)

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def load_folder_tokenizer(path: Path) -> FastTokenizer:
    """Load a folder with tokenizer.json, or a tokenizer.json by its own path."""
    file = path / "tokenizer.json" if path.is_dir() else path
    with panics_as_errors(file):
        return wrap_backend(_read_backend(file), file.parent)


def _read_backend(file: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every kind of damage
        raise CheckpointError(
            f"{file} cannot be read as a tokenizer: {error}; fetch the file again"
        ) from error


def wrap_backend(
    backend: Backend,
    folder: Path,
    *,
    named: Mapping[str, str] | None = None,
    adds_bos: bool | None = None,
) -> FastTokenizer:
    """Join a library tokenizer with the settings that lie in `folder`.

    `named` and `adds_bos` are what the vocabulary's own format says; the settings win over both.
    """
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    try:
        tokens = special_tokens(config, special_map, named or {})
        templates = chat_templates(folder, config)
        _add_missing_tokens(backend, config, tokens, folder)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PagemillError):
            raise
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} is not shaped as one: {type(error).__name__}: {error}"
        ) from error
    if not tokens:
        # A bare tokenizer.json names nothing; what it puts first is its begin token.
        for token in backend.encode("").tokens[:1]:
            tokens["bos_token"] = token
    _obey_add_flags(backend, {"add_bos_token": adds_bos, **config}, tokens)
    return FastTokenizer(backend, TokenizerSettings(str(folder), tokens, templates))


def special_tokens(
    config: dict[str, Any], special_map: dict[str, Any], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the special tokens by name: the known ones, over them special_tokens_map.json, over it
    tokenizer_config.json, where null takes a token away."""
    named = dict(known)
    extra = config.get("extra_special_tokens")
    for entries in (special_map, extra if isinstance(extra, dict) else {}, config):
        names = entries if entries is extra else _SPECIAL_NAMES
        for name in names:
            if name not in entries:
                continue
            content = _content(entries[name])
            if content is None:
                named.pop(name, None)
            else:
                named[name] = content
    return named


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return every chat template by name; the unnamed one is "default"."""
    found: dict[str, str] = {}
    for holder in (config, _read_json(folder / "chat_template.json")):
        given = holder.get("chat_template")
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, list):
            found.update({entry["name"]: entry["template"] for entry in given})
        elif isinstance(given, dict):
            found.update(given)
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = _read_text(file)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = _read_text(extra)
    return found


def _add_missing_tokens(
    backend: Backend, config: dict[str, Any], named: dict[str, str], folder: Path
) -> None:
    """Add the tokens that only tokenizer_config.json knows; named ones count as special."""
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if entry["content"] in present:
            continue
        flags = {k: bool(v) for k, v in entry.items() if k != "content"}
        backend.add_tokens([AddedToken(entry["content"], **flags)])
        present.add(entry["content"])
        got = backend.token_to_id(entry["content"])
        if got != int(key):
            logger.warning(
                "%s: tokenizer_config.json gives %r the id %s, but the vocabulary makes it %d",
                folder,
                entry["content"],
                key,
                got,
            )
    listed = [_content(entry) for entry in _extra_list(config)]
    for content in [*named.values(), *(c for c in listed if c is not None)]:
        if content not in present:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            present.add(content)


def _extra_list(config: dict[str, Any]) -> list[Any]:
    lists = (config.get("additional_special_tokens"), config.get("extra_special_tokens"))
    return [entry for given in lists if isinstance(given, list) for entry in given]


def _obey_add_flags(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Make `add_bos_token` and `add_eos_token` true where the post-processor says otherwise."""
    from tokenizers import processors

    around = backend.encode("").tokens
    has = {
        "bos": named.get("bos_token") in around[:1],
        "eos": named.get("eos_token") in around[-1:],
    }
    wanted = {}
    for end in ("bos", "eos"):
        flag = config.get(f"add_{end}_token")
        wanted[end] = has[end] if flag is None else bool(flag) and f"{end}_token" in named
    if wanted == has:
        return
    bos, eos = named.get("bos_token"), named.get("eos_token")
    single = [*([bos] if wanted["bos"] else []), "$A", *([eos] if wanted["eos"] else [])]
    used = [token for token in single if token is not None and token != "$A"]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{token}:1" if token != "$A" else "$B:1" for token in single)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )


def _content(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{file} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, not an object")
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
