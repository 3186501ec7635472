"""Qwen3, dense: Llama's shape with a norm of each query and key head. Yang et al. 2025."""

from __future__ import annotations

from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.base import Build
from pagemill.models.blocks import DecoderLM, Parts
from pagemill.models.config_reader import ConfigReader
from pagemill.models.llama import (
    LLAMA_MODULES,
    QK_NORM_MODULES,
    ROTARY_TABLES,
    LlamaSwitches,
    llama_parts,
)
from pagemill.models.qwen2 import read_qwen_sizes
from pagemill.models.weight_map import WeightMap


class Qwen3(DecoderLM):
    """Q and k are normed per head; head_dim does not follow from the hidden size."""

    weight_map = WeightMap(
        prefixes=("model.",), modules=LLAMA_MODULES | QK_NORM_MODULES, ignored=(ROTARY_TABLES,)
    )

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        return read_qwen_sizes(reader, head_dim=128)

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        bias = reader.read(bool, "attention_bias", default=False)
        switches = LlamaSwitches(qkv_bias=bias, out_bias=bias, qk_norm=True)
        return llama_parts(reader, cls.read_sizes(reader), config, build, tied, switches)
