"""Repetition, frequency and presence penalties of one row.

They are computed from the row's tokens each time and keep no state, so a recomputed sequence cannot
differ. Called by `processors` for rows that ask for one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import SamplingSpec


def wants_penalties(spec: SamplingSpec) -> bool:
    """Return whether any penalty is on."""
    return (
        spec.repetition_penalty != 1.0
        or spec.frequency_penalty != 0.0
        or spec.presence_penalty != 0.0
    )


def apply_penalties(
    logits: NDArray[np.float32],
    spec: SamplingSpec,
    token_ids: NDArray[np.int32],
    num_prompt_tokens: int,
) -> None:
    """Penalize one row [vocab] in place; `token_ids` are the prompt, then the output.

    Repetition covers both and divides positive logits, multiplies others (N. S. Keskar et al., "CTRL",
    2019, section 4.1). Frequency, per count, and presence, once, cover the output only.
    """
    if spec.repetition_penalty != 1.0:
        factor = np.float32(spec.repetition_penalty)
        # A token that occurs twice is read twice before anything is written: no double penalty.
        seen = logits[token_ids]
        logits[token_ids] = np.where(seen > 0, seen / factor, seen * factor)
    if spec.frequency_penalty == 0.0 and spec.presence_penalty == 0.0:
        return
    ids, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
    logits[ids] -= np.float32(spec.frequency_penalty) * counts.astype(np.float32)
    logits[ids] -= np.float32(spec.presence_penalty)
