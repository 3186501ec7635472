"""Settled configuration: frozen dataclasses, one per concern; `EngineConfig` holds them.

Nothing here is "auto": `engine.resolve` turns `EngineArgs` into an `EngineConfig` once, logging each
choice with its reason. A class takes the section it needs, not the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Element sizes in bytes of the dtypes a model or cache may have.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The executor whose worker runs in the engine's own process, so that functions can reach it.
IN_PROCESS = "in_process"


def int8_token_bytes(head_dim: int) -> int:
    """Return what one head's key or value of one token takes in an int8 cache: codes and a scale."""
    return -(-head_dim // 4) * 4 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One attention layer, as far as the KV cache and the memory plan are concerned."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None  # keys a query sees, itself included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that planning needs. Filled by the model's `read_shape`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int  # rows of the embedding and of the head
    layers: tuple[LayerShape, ...]
    max_position: int  # longest context the checkpoint declares

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of K and V that one token needs over all layers."""
        if dtype == "int8":
            return sum(
                2 * layer.num_kv_heads * int8_token_bytes(layer.head_dim) for layer in self.layers
            )
        elements = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers)
        return elements * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, from which files, read how."""

    model: str  # as the caller named it
    path: str  # local folder or .gguf file
    tokenizer: str  # local folder or file the tokenizer is read from
    skip_tokenizer_init: bool
    served_model_name: str
    load_format: str  # "safetensors" | "gguf" | "dummy"
    model_type: str  # key of the model registry
    hf_config: dict[str, Any]  # config.json, or the same made from GGUF metadata
    generation_config: dict[str, Any]  # sampling defaults that the model brings, already filtered
    shape: ModelShape
    dtype: str  # key of DTYPE_BYTES
    quantization: str | None
    max_model_len: int
    seed: int | None  # of the stream that seeds unseeded requests; None: from the system
    eos_token_ids: tuple[int, ...]  # union of tokenizer, config and generation_config
    max_logprobs: int
    logprobs_mode: str  # "raw_logprobs" | "processed_logprobs" | "raw_logits" | "processed_logits"
    logits_processors: tuple[str, ...]  # engine-level, "module:attribute"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int  # tokens a block
    dtype: str  # key of DTYPE_BYTES, or "int8"
    gpu_memory_utilization: float  # share of the memory available at start
    kv_cache_memory_bytes: int | None  # sets the pool outright
    enable_prefix_caching: bool
    num_blocks: int | None = None  # None until the memory plan is made
    swap_space_bytes: int = 0  # of the host tier; 0: there is none
    swap_dir: str = ""  # folder of its file
    kv_cache_file: str | None = None  # its file, when it is to outlive the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of a step and the order of service."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str  # key of the policy registry
    tenant_weights: dict[str, float] = field(default_factory=dict)  # shares of policy "fair"
    preemption_mode: str = "auto"  # swap or recompute; auto: what the measured costs favour
    async_scheduling: bool = False  # a step is planned while the one before it computes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How ranks are run."""

    executor: str  # key of the executor registry
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where tensors live."""

    device: str  # key of the device registry
    num_threads: int  # compute threads of a CPU device
    enforce_eager: bool = False  # no recorded steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters served beside the base model."""

    max_loras: int
    max_lora_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Draft tokens, checked by the target model."""

    method: str  # key of the proposer registry
    num_speculative_tokens: int  # most drafts of one sequence in one step
    adaptive_length: bool  # fewer where they do not pay, down to none
    options: dict[str, int | float]  # the method's own, all of them, checked
    draft_model: ModelConfig | None = None  # of a method that needs one
    # Most drafts of all sequences in one step: each is a row of logits, and a step of more tokens than
    # this computes so much that none is for free.
    max_drafts: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Grammar-constrained output."""

    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """What is logged and counted."""

    log_stats: bool
    log_stats_interval_s: float
    metrics_prefix: str
    debug: bool  # check the block invariant after every step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All sections. A section of a feature that is off is None."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    observability: ObservabilityConfig
    lora: LoRAConfig | None = None
    speculative: SpeculativeConfig | None = None
    structured_outputs: StructuredOutputsConfig | None = None
    notes: tuple[str, ...] = field(default=())  # each settled "auto" with its reason
