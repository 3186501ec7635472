"""Mistral: Llama's shape with a sliding window. Jiang et al. 2023."""

from __future__ import annotations

from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.base import Build
from pagemill.models.blocks import DecoderLM, Parts
from pagemill.models.config_reader import FULL, SLIDING, ConfigReader, make_shape
from pagemill.models.llama import LLAMA_MODULES, ROTARY_TABLES, LlamaSwitches, llama_parts
from pagemill.models.weight_map import WeightMap


class Mistral(DecoderLM):
    """A window in every layer, where `sliding_window` is set and `layer_types` does not differ."""

    weight_map = WeightMap(prefixes=("model.",), modules=LLAMA_MODULES, ignored=(ROTARY_TABLES,))

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        num_layers = reader.num_layers()
        window = reader.nullable(int, "sliding_window", 4096)
        usual = [FULL if window is None else SLIDING] * num_layers
        return make_shape(
            reader, reader.windows(window, usual), reader.heads(),
            intermediate_size=reader.size("intermediate_size"),
        )  # fmt: skip

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        return llama_parts(reader, cls.read_sizes(reader), config, build, tied, LlamaSwitches())
