"""Attention over whole sequences in float64, a full matrix of scores a head: slow and plain."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.attention.base import AttentionSpec


def attend_whole(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Return the outputs of a sequence's last queries.

    q [queries, heads, dim] of the last positions; k and v [length, kv_heads, dim] of all.
    """
    q, k, v = q.double(), k.double(), v.double()
    keys = torch.arange(k.shape[0])
    queries = keys[k.shape[0] - q.shape[0] :].unsqueeze(1)
    visible = keys <= queries
    if spec.sliding_window is not None:
        visible &= queries - keys < spec.sliding_window
    out = torch.empty_like(q)
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T * spec.scale
        if spec.logit_softcap is not None:
            scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
        weights = scores.exp() * visible
        extra = 0.0 if sinks is None else sinks[head].double().exp()
        out[:, head] = weights @ v[:, kv_head] / (weights.sum(1, keepdim=True) + extra)
    return out
