"""Repetition, frequency and presence penalties of one row.

They are computed from the row's tokens each time and keep no state, so a recomputed sequence cannot
differ. Called by `processors` for rows that ask for one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill.messages import SamplingSpec

_FLOAT32 = np.finfo(np.float32)
# Penalized logits stay within this, so that the difference of two is finite.
_LARGEST = np.float32(_FLOAT32.max / 4)


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
        # A token that occurs twice is read twice before anything is written: no double penalty.
        logits[token_ids] = _repeated(logits[token_ids], spec.repetition_penalty)
    if spec.frequency_penalty == 0.0 and spec.presence_penalty == 0.0:
        return
    ids, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
    logits[ids] -= np.float32(spec.frequency_penalty) * counts.astype(np.float32)
    logits[ids] -= np.float32(spec.presence_penalty)


def repetition_factor(penalty: float) -> float:
    """Return a repetition penalty within what float32 can hold."""
    return min(max(penalty, float(_FLOAT32.tiny)), float(_FLOAT32.max))


def _repeated(seen: NDArray[np.float32], penalty: float) -> NDArray[np.float32]:
    """Return penalized logits: finite for every legal penalty; what is masked stays so."""
    factor = np.float32(repetition_factor(penalty))
    with np.errstate(over="ignore", under="ignore"):
        changed = np.where(seen > 0, seen / factor, seen * factor)
    bounded: NDArray[np.float32] = np.clip(changed, -_LARGEST, _LARGEST)
    return np.where(np.isfinite(seen), bounded, seen)
