"""Which of the target model's samples stand: those up to the first that the draft did not have.

The sample of a position is a function of the tokens before it and of (seed, sample index, position). A
sample behind a draft token is therefore the very one that a step of its own would draw, if that token is
what was sampled at its place; so it is enough to compare the two. No ratio of probabilities is needed, and
nothing depends on where drafts come from. `docs/decisions/008` compares this with the rejection rule of
Y. Leviathan et al. (2023). Called by `worker.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.messages import TokenScores
from pagemill.sampling.sampler import SampledRow


def accept(drafts: Sequence[int], sampled: Sequence[SampledRow]) -> SampledRow:
    """Return what stands of samples 0..k, sample j drawn as if the first j of k drafts were true.

    The result's tokens are a run: one position's after another's.

    A row that failed ends the run before it: the position is computed again in the next step, and if it
    fails as the first one, that is the sequence's error.
    """
    tokens: list[int] = []
    scores: list[TokenScores] = []
    for count, row in enumerate(sampled):
        if row.error is not None:
            if count == 0:
                return SampledRow(error=row.error)
            break
        tokens += row.tokens
        scores += row.scores
        if count < len(drafts) and row.tokens[0] != drafts[count]:
            break
    return SampledRow(tuple(tokens), tuple(scores))
