"""The engines that can be measured, one file each, each in a process of its own driven line by line.

An engine is a file here with `load(options) -> Engine`, and a line in ENGINES. Its file runs in the virtual
environment that the line names, so beside the engine it imports the standard library alone; this file
imports nothing else either. `process.py` is the caller's end, `__main__.py` the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What a model must be turned into before an engine can load it.
FOLDER, GGUF, OPENVINO = "folder", "gguf", "openvino"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Where an engine is found and what it loads."""

    title: str  # its name in tables
    module: str  # its file in this folder
    venv: str | None  # its virtual environment; None: the caller's own
    package: str  # the package there that tells that it is installed
    form: str  # what it loads: FOLDER, GGUF or OPENVINO
    formats: Mapping[str, str]  # weight format -> the engine's own word for it


ENGINES: dict[str, EngineKind] = {
    "pagemill": EngineKind(
        "pagemill", "pagemill", None, "pagemill", FOLDER,
        {"bf16": "bfloat16", "int8": "int8", "int4": "int4"},
    ),
    "vllm": EngineKind("vLLM-CPU", "vllm", "vllm", "vllm", FOLDER, {"bf16": "bfloat16"}),
    "openvino": EngineKind(
        "OpenVINO GenAI", "openvino", "openvino", "openvino_genai", OPENVINO,
        {"bf16": "fp16", "int8": "int8", "int4": "int4"},
    ),
    "llamacpp": EngineKind(
        "llama.cpp", "llamacpp", "llamacpp", "llama_cpp", GGUF,
        {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"},
    ),
    "transformers-generate": EngineKind(
        "transformers generate", "transformers_generate", None, "transformers", FOLDER,
        {"bf16": "bfloat16"},
    ),
    "transformers-continuous": EngineKind(
        "transformers continuous", "transformers_continuous", None, "transformers", FOLDER,
        {"bf16": "bfloat16"},
    ),
}  # fmt: skip
