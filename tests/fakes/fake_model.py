"""Models without trained weights, for tests of the engine and the server.

`FakeCausalLM` computes its next token from a hash of every token and position before it, read back through
the KV cache: a wrong block, slot, table or position changes what it says. `FakeExecutor` runs it with the
real runner, cache and sampler. `save_tiny_llama` writes a small random Llama that loads in no time.

    hf_config {"fake_mode": "hash"}        printable text that depends on the whole history (default)
    hf_config {"fake_mode": "successor"}   after byte b comes b + 1, so "A" goes on with "BCDEF..."
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from pagemill.attention.base import AttentionBatch, AttentionSpec, StepAttention
from pagemill.batch.kv_store import KVStore
from pagemill.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LayerShape,
    ModelConfig,
    ModelShape,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pagemill.device.cpu import CPUDevice
from pagemill.memory_plan import MemoryPlan
from pagemill.messages import SchedulerOutput, StepOutput
from pagemill.sampling.sampler import Sampler
from pagemill.speculation import PROPOSERS
from pagemill.speculation.base import Proposer, RankParts
from pagemill.worker.model_runner import ModelRunner

VOCAB_SIZE = 260
FIRST_PRINTABLE, NUM_PRINTABLE = 32, 95
_DIGITS = 8
_PRIME = (1 << 31) - 1


class FakeCausalLM(torch.nn.Module):
    """A `CausalLM` whose attention layer sums one hash a cached token."""

    weight_map: ClassVar[Any] = None

    def __init__(self, hf_config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._mode = (hf_config or {}).get("fake_mode", "hash")

    @classmethod
    def read_shape(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        return ModelShape(
            hidden_size=_DIGITS + 2,
            intermediate_size=1,
            num_heads=1,
            vocab_size=VOCAB_SIZE,
            layers=(LayerShape(num_kv_heads=1, head_dim=_DIGITS),),
            max_position=int(hf_config.get("max_position_embeddings", 4096)),
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=_DIGITS, scale=1.0),)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return [num_tokens, 10]: eight sums over the history, the position and the token."""
        mixed = _mix(token_ids * 7919 + positions * 104729 + 1)
        digits = (mixed[:, None] >> (torch.arange(_DIGITS) * 3)) & 15
        values = digits.float()[:, None, :]
        zeros = torch.zeros_like(values)  # equal scores: attention is the mean
        mean = attend(0, zeros, zeros.clone(), values)[:, 0]
        sums = torch.round(mean * (positions[:, None] + 1))
        hidden = torch.cat([sums, positions[:, None].float(), token_ids[:, None].float()], dim=1)
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        whole = hidden.to(torch.int64)
        state = torch.zeros(len(whole), dtype=torch.int64)
        for column in whole.T:
            state = _mix(state * 31 + column + 1)
        noise = _mix(state[:, None] + torch.arange(VOCAB_SIZE) * 6700417)
        logits = noise.float() * (4.0 / _PRIME)
        if self._mode == "successor":
            best = (whole[:, -1] + 1 - FIRST_PRINTABLE) % NUM_PRINTABLE + FIRST_PRINTABLE
        else:
            best = state % NUM_PRINTABLE + FIRST_PRINTABLE
        logits[torch.arange(len(whole)), best] = 6.0
        logits[:, 256:] = -20.0  # special tokens come only when a test asks for them
        return logits

    def peak_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return num_tokens * 400 + num_logit_rows * VOCAB_SIZE * 24


def _mix(x: Tensor) -> Tensor:
    x = x % _PRIME
    for multiplier in (48271, 69621):
        x = (x * multiplier + 11) % _PRIME
        x = x ^ (x >> 13)
    return x % _PRIME


class NaiveAttention:
    """An `AttentionBackend` that loops over sequences; softmax in float32."""

    name = "naive"

    def allocate_kv(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # Garbage, not zeros: whoever reads what was never written gets a wrong answer.
        return torch.full(shape, 7.25, dtype=dtype), torch.full(shape, 7.25, dtype=dtype)

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        plan: AttentionBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None and spec.logit_softcap is None
        flat_k, flat_v = (pool.flatten(0, 1) for pool in kv)
        flat_k[plan.slot_mapping] = k.to(flat_k.dtype)
        flat_v[plan.slot_mapping] = v.to(flat_v.dtype)
        out = torch.empty_like(q)
        groups = spec.num_heads // spec.num_kv_heads
        for i in range(plan.num_seqs):
            start, end = plan.query_starts[i], plan.query_starts[i + 1]
            length = plan.num_computed[i] + end - start
            places = torch.arange(length)
            size = plan.block_size
            slots = plan.block_tables[i][places // size] * size + places % size
            keys = flat_k[slots].float().repeat_interleave(groups, dim=1)
            values = flat_v[slots].float().repeat_interleave(groups, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * spec.scale
            at = plan.num_computed[i] + torch.arange(end - start)[:, None]
            hidden = places[None] > at
            if spec.sliding_window is not None:
                hidden |= places[None] <= at - spec.sliding_window
            scores = scores.masked_fill(hidden, float("-inf"))
            out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        return out

    def peak_bytes(
        self,
        spec: AttentionSpec,
        max_tokens: int,
        max_seqs: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> int:
        return max_tokens * max_len * spec.num_heads * 12


def fake_config(
    *,
    hf_config: dict[str, Any] | None = None,
    max_model_len: int = 256,
    block_size: int = 4,
    num_blocks: int = 128,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = False,
    speculative: SpeculativeConfig | None = None,
    **model_fields: Any,
) -> EngineConfig:
    """Return the settled configuration of an engine over `FakeCausalLM` (model_type "fake")."""
    hf_config = {"model_type": "fake", **(hf_config or {})}
    model = ModelConfig(
        model="fake",
        path="fake",
        tokenizer="fake",
        skip_tokenizer_init=True,
        served_model_name="fake",
        load_format="dummy",
        model_type="fake",
        hf_config=hf_config,
        generation_config={},
        shape=FakeCausalLM.read_shape(hf_config),
        dtype="float32",
        quantization=None,
        max_model_len=max_model_len,
        seed=0,
        eos_token_ids=(257,),
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
        logits_processors=(),
    )
    return EngineConfig(
        model=dataclasses.replace(model, **model_fields),
        cache=CacheConfig(
            block_size=block_size,
            dtype="float32",
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=None,
            enable_prefix_caching=enable_prefix_caching,
            num_blocks=num_blocks,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, policy="fcfs"
        ),
        parallel=ParallelConfig(executor="in_process"),
        device=DeviceConfig(device="cpu", num_threads=1),
        observability=ObservabilityConfig(
            log_stats=False, log_stats_interval_s=5.0, metrics_prefix="pagemill", debug=True
        ),
        speculative=speculative,
    )


class FakeExecutor:
    """An `Executor` in this process: the fake model under the real runner, cache and sampler.

    `proposer` None: that of `config.speculative`, if any.
    """

    def __init__(self, config: EngineConfig, proposer: Proposer | None = None) -> None:
        model = FakeCausalLM(config.model.hf_config)
        backend = NaiveAttention()
        device = CPUDevice()
        num_blocks = config.cache.num_blocks
        assert num_blocks is not None
        kv = KVStore(
            backend,
            model.attention_specs,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            dtype=torch.float32,
            device=device.torch_device,
        )
        sampler = Sampler(
            dtype=config.model.dtype,
            logprobs_mode=config.model.logprobs_mode,
            logits_processors=config.model.logits_processors,
        )
        if proposer is None and config.speculative is not None:
            parts = RankParts(
                backend, sampler, device.torch_device, "torch", num_blocks, lambda model: None
            )
            proposer = PROPOSERS.load(config.speculative.method).make(config, parts)
        self.runner = ModelRunner(
            model, backend, kv, sampler, device,
            max_logit_rows=config.scheduler.max_num_seqs, proposer=proposer,
        )  # fmt: skip
        self.steps: list[SchedulerOutput] = []  # all that were run
        self._plan = MemoryPlan(
            available_bytes=1 << 30,
            usable_bytes=1 << 29,
            weight_bytes=0,
            peak_activation_bytes=0,
            kv_cache_bytes=kv.size_bytes,
            block_bytes=kv.size_bytes // num_blocks,
            num_blocks=num_blocks,
            num_tokens=num_blocks * config.cache.block_size,
            max_model_len=config.model.max_model_len,
            num_full_requests=num_blocks * config.cache.block_size / config.model.max_model_len,
        )

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._plan

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        self.steps.append(scheduled)
        return self.runner.execute(scheduled)

    def check_health(self) -> None:
        """Do nothing: this executor lives as long as the process."""

    def shutdown(self) -> None:
        """Do nothing: the memory goes with the object."""


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = {"<bos>": 256, "<eos>": 257, "<|im_end|>": 258, "<|im_start|>": 259}


def save_tiny_llama(
    folder: Path | str, *, seed: int = 0, max_position: int = 2048, **sizes: int
) -> Path:
    """Write a random two-layer Llama over bytes with its tokenizer; return the folder.

    Vocabulary: bytes 0..255, then <bos>, <eos>, <|im_end|>, <|im_start|>. Float32, about 0.5 MB without
    `sizes`, further keys of config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
        **sizes,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": [257]})
    save_file(_tiny_weights(config, seed), str(folder / "model.safetensors"), {"format": "pt"})
    _save_byte_level_tokenizer(folder, max_position)
    return folder


def _tiny_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * (scale / shape[-1] ** 0.5)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    embedding = random(VOCAB_SIZE, hidden, scale=4.0)
    embedding[256:] *= 0.1  # special tokens are unlikely, so outputs run to their length
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": random(q_rows, hidden, scale=2.0),
            prefix + "self_attn.k_proj.weight": random(kv_rows, hidden, scale=2.0),
            prefix + "self_attn.v_proj.weight": random(kv_rows, hidden, scale=2.0),
            prefix + "self_attn.o_proj.weight": random(hidden, q_rows, scale=2.0),
            prefix + "mlp.gate_proj.weight": random(inner, hidden, scale=2.0),
            prefix + "mlp.up_proj.weight": random(inner, hidden, scale=2.0),
            prefix + "mlp.down_proj.weight": random(hidden, inner, scale=2.0),
        }
    return weights


def _save_byte_level_tokenizer(folder: Path, max_position: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "add_bos_token": False,
            "model_max_length": max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in printable}
    spare = iter(range(256, 512))
    return [chars[byte] if byte in chars else chr(next(spare)) for byte in range(256)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
