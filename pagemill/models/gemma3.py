"""Gemma 3, its text decoder: five windowed layers to a full one, two rotary bases, q/k norms.

Gemma Team 2025. Also the decoder inside a `gemma3` checkpoint that reads pictures too; its picture
tower is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.config import ModelConfig, ModelShape
from pagemill.errors import CheckpointError
from pagemill.layers.base import Build
from pagemill.models.blocks import DecoderLM, Parts, read_rope
from pagemill.models.config_reader import FULL, SLIDING, ConfigReader
from pagemill.models.gemma2 import (
    GEMMA_MODULES,
    GemmaSwitches,
    gemma_parts,
    gemma_sizes,
)
from pagemill.models.llama import QK_NORM_MODULES, ROTARY_TABLES
from pagemill.models.weight_map import WeightMap

_GLOBAL_BASE = 1_000_000.0
_LOCAL_BASE = 10_000.0


class Gemma3(DecoderLM):
    """Windowed layers have a rotary base of their own, unscaled."""

    weight_map = WeightMap(
        prefixes=(
            "model.",
            "model.language_model.",
            "language_model.model.",
            "language_model.",
        ),
        modules=GEMMA_MODULES | QK_NORM_MODULES,
        ignored=(ROTARY_TABLES, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    )
    ties_by_default = True
    scaling_stretches = False  # the written context has it in already

    @classmethod
    def decoder_config(cls, hf_config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of `text_config` where there is one."""
        text = hf_config.get("text_config")
        if text is None:
            return ConfigReader(hf_config)
        if not isinstance(text, Mapping):
            raise CheckpointError(f"text_config in config.json is {text!r}; it must be an object")
        # The sizes that older files leave out are those of the 4B model.
        sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        context = {"max_position_embeddings": 131_072}
        return ConfigReader({"model_type": "gemma3_text", **sizes, **heads, **context, **text})

    @classmethod
    def read_sizes(cls, reader: ConfigReader) -> ModelShape:
        """Read the sizes and windows."""
        reader.require(
            "attn_logit_softcapping", (), reason="Gemma 3 caps no attention scores; set it to null"
        )
        every = reader.size("sliding_window_pattern", default=6)
        num_layers = reader.num_layers()
        usual = [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
        return gemma_sizes(reader, usual, vocab_size=262_208)

    @classmethod
    def build_parts(
        cls, reader: ConfigReader, config: ModelConfig, build: Build, tied: bool
    ) -> Parts:
        """Build the parts."""
        shape = cls.read_sizes(reader)
        ropes = tuple(
            read_rope(
                reader, shape, config, layer_type=layer_type,
                default_base=_GLOBAL_BASE, local_base=_LOCAL_BASE,
            )
            for layer_type in (FULL, SLIDING)
        )  # fmt: skip
        switches = GemmaSwitches(
            qk_norm=True,
            attention_softcap=None,
            final_softcap=reader.nullable(float, "final_logit_softcapping", None),
            ropes=ropes,
            layer_ropes=tuple(0 if layer.sliding_window is None else 1 for layer in shape.layers),
        )
        return gemma_parts(reader, shape, build, tied, switches)
