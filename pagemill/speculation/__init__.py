"""Speculative decoding: several tokens a step, the same tokens as one by one.

Three rooms. A *proposer* guesses how sequences go on (one file each, registered here). The *scorer* has the
target model sample every position that the guess reaches, as if the guess were true. The *rejection
sampler* keeps the samples up to the first one that the guess did not have. So whatever is guessed, what is
kept is what the target model samples itself; a good guess only brings more of it in one step.

Called by the worker, which makes the proposer, and by `worker.model_runner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.registry import Registry

if TYPE_CHECKING:
    from pagemill.speculation.base import Proposer

PROPOSERS: Registry[type[Proposer]] = Registry(
    "speculative method",
    {
        "ngram": "pagemill.speculation.ngram:NGramProposer",
        "suffix": "pagemill.speculation.suffix:SuffixProposer",
        "draft_model": "pagemill.speculation.draft_model:DraftModelProposer",
    },
)
