"""Phi-3, Phi-3.5 and Phi-4: Llama's shape with fused projections in the files. Abdin et al. 2024.

Longer contexts come with searched rotary divisors (longrope); some sizes turn part of a head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.config import ModelConfig, ModelShape
from pagemill.layers.base import Build
from pagemill.models.blocks import DecoderLM, Parts
from pagemill.models.config_reader import FULL, SLIDING, ConfigReader, make_shape
from pagemill.models.llama import LLAMA_MODULES, ROTARY_TABLES, LlamaSwitches, llama_parts
from pagemill.models.weight_map import WeightMap

_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Phi3(DecoderLM):
    """q, k and v in one matrix of the file, gate and up in another."""

    weight_map = WeightMap(
        prefixes=("model.",),
        modules={
            **{name: place for name, place in LLAMA_MODULES.items() if not name.endswith(_SPLIT)},
            "layers.{}.self_attn.qkv_proj": "layers.{}.attention.qkv",
            "layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up",
        },
        ignored=(ROTARY_TABLES,),
    )

    @classmethod
    def decoder_config(cls, hf_config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the configuration, this family's rotary habits spelled out."""
        return ConfigReader(_with_longrope(hf_config))

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        num_layers = reader.num_layers()
        window = reader.optional(int, "sliding_window")
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
        shape = cls.read_sizes(reader)
        return llama_parts(reader, shape, config, build, tied, LlamaSwitches())


def _with_longrope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with this family's own habits of rotary settings spelled out.

    Early files call longrope "su" or "yarn"; the original context is 4096 where it is not written.
    """
    config = {"rms_norm_eps": 1e-5, **hf_config}
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if not isinstance(settings, dict):
            continue
        kind = settings.get("rope_type") or settings.get("type")
        if kind in ("su", "yarn", "longrope"):
            config[key] = {**settings, "rope_type": "longrope"}
            if "original_max_position_embeddings" not in settings:
                config.setdefault("original_max_position_embeddings", 4096)
    return config
