"""Qwen2 and Qwen2.5: Llama's shape with biased q, k and v, and windows in the upper layers.

Yang et al. 2024. `read_qwen_sizes` also reads Qwen3's.
"""

from __future__ import annotations

from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.base import Build
from pagemill.models.blocks import DecoderLM, Parts
from pagemill.models.config_reader import FULL, SLIDING, ConfigReader, make_shape
from pagemill.models.llama import LLAMA_MODULES, ROTARY_TABLES, LlamaSwitches, llama_parts
from pagemill.models.weight_map import WeightMap


def read_qwen_sizes(reader: ConfigReader, *, head_dim: int | None) -> ModelShape:
    """Read the sizes; windows apply from layer `max_window_layers` on, if switched on at all."""
    num_layers = reader.num_layers()
    window = None
    if reader.read(bool, "use_sliding_window", default=False):
        window = reader.nullable(int, "sliding_window", 4096)
    first = reader.read(int, "max_window_layers", default=28)
    usual = [FULL if window is None or index < first else SLIDING for index in range(num_layers)]
    return make_shape(
        reader, reader.windows(window, usual), reader.heads(head_dim=head_dim),
        intermediate_size=reader.size("intermediate_size"),
    )  # fmt: skip


class Qwen2(DecoderLM):
    """Biases on q, k and v only."""

    weight_map = WeightMap(prefixes=("model.",), modules=LLAMA_MODULES, ignored=(ROTARY_TABLES,))

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        return read_qwen_sizes(reader, head_dim=None)

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        switches = LlamaSwitches(qkv_bias=True)
        return llama_parts(reader, cls.read_sizes(reader), config, build, tied, switches)
