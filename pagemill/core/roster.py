"""Who is here: the unfinished sequences, the queue each is in, and the blocks each holds.

Every change of a sequence's state is one method here, which keeps status, queue, blocks and the ranks' rows
in step with each other:

    enter      a new request           -> waiting
    seat       waiting or swapped      -> running
    preempt    running (or waiting with blocks) -> swapped, or waiting, without blocks; paused stays so
    lose       running or swapped      -> waiting: what it computed is lost
    fork       a computed prompt       -> its other samples, waiting, on the same blocks
    pause      running                 -> in no queue, with its blocks, until its beam search goes on
    enter_fork a paused beam           -> one that continues it, on the same blocks
    end        anywhere                -> finished, nothing held
    break_off  anywhere, in any state  -> the same, for a request on which this wing itself has failed

Owned by the scheduler; `step_commit` and `step_results` change it in the two halves of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagemill.core.block_manager import BlockManager
from pagemill.core.policies.walled import WalledPolicy
from pagemill.core.sequence import Sequence, SequenceCounter, SequenceGroup, SequenceStatus
from pagemill.core.sequence_queue import SequenceQueue
from pagemill.errors import words_of
from pagemill.messages import EngineRequest, LostMoves, QueueSizes, SequenceUpdate, TokenScores


class Roster:
    """All unfinished sequences over one pool of blocks."""

    def __init__(self, blocks: BlockManager, policy: WalledPolicy, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.policy = policy
        self.waiting = policy.make_queue()
        self.running = SequenceQueue(policy.running_key)
        # By seq_id. They are among `waiting` too: the policy says who comes back when, and who begins.
        self.swapped: dict[int, Sequence] = {}
        self.groups: dict[str, SequenceGroup] = {}  # by request_id
        self.sequences: dict[int, Sequence] = {}  # by seq_id
        self.seq_ids = SequenceCounter()
        self._max_num_seqs = max_num_seqs
        self._num_added = 0
        self._removed: list[int] = []  # ended since the last step, rows still on the ranks

    # ------------------------------------------------------------ read

    def queue_sizes(self) -> QueueSizes:
        """Return the number of sequences in each queue; samples not forked yet are in none."""
        num_swapped = len(self.swapped)
        return QueueSizes(
            running=len(self.running),
            waiting=len(self.waiting) - num_swapped,
            swapped=num_swapped,
        )

    def waiting_holders(self) -> list[Sequence]:
        """Return the sequences that hold blocks and do not run."""
        holders = (self.sequences[seq_id] for seq_id in self.blocks.holders())
        return [s for s in holders if s.status is not SequenceStatus.RUNNING]

    def check(self) -> None:
        """Assert that blocks, queues and counts agree. Reads everything."""
        self.blocks.check()
        block_size = self.blocks.block_size
        queued = {s.seq_id: SequenceStatus.WAITING for s in self.waiting}
        assert self.swapped.keys() <= queued.keys(), "swapped, and nobody will seat it"
        queued.update(dict.fromkeys(self.swapped, SequenceStatus.SWAPPED))
        queued.update((s.seq_id, SequenceStatus.RUNNING) for s in self.running)
        assert len(queued) == len(self.waiting) + len(self.running), "queued twice"
        assert self.swapped.keys() == set(self.blocks.swapped_ids()), "tier and queue differ"
        paused = [s for s in self.sequences.values() if s.status is SequenceStatus.PAUSED]
        assert all(s.group.beams is not None for s in paused), "paused, but no beam"
        queued.update((s.seq_id, SequenceStatus.PAUSED) for s in paused)
        assert queued.keys() == self.sequences.keys(), "queues and sequences differ"
        assert set(self.blocks.holders()) <= queued.keys(), "an ended sequence holds blocks"
        assert len(self.running) <= self._max_num_seqs, "more sequences than seats"
        for sequence in self.sequences.values():
            assert sequence.status is queued[sequence.seq_id], "status and queue differ"
            end = sequence.num_computed + sequence.num_scheduled
            assert 0 <= end <= sequence.num_tokens, "more tokens computed than known"
            if end or self.blocks.table(sequence.seq_id):
                self.blocks.check_table(sequence, end)
            num_named = len(sequence.block_names)
            num_known = sequence.num_tokens - sequence.num_pending
            assert num_named in (0, num_known // block_size), "full blocks without a name"
        for group in self.groups.values():
            hidden = 0 if group.is_forked else group.request.num_samples - 1
            assert group.num_unfinished == len(group.sequences) + hidden, "samples miscounted"

    # ------------------------------------------------------------ change

    def enter(self, request: EngineRequest) -> Sequence:
        """Queue a request that can run; return its root sequence. A policy may raise: then it is not here."""
        group = SequenceGroup(request, self._num_added, request.num_samples)
        self._num_added += 1
        self.policy.note_arrival(group)
        root = Sequence(
            seq_id=self.seq_ids.take(),
            group=group,
            sample_index=0,
            prompt_token_ids=request.prompt_token_ids,
            num_tokens=len(request.prompt_token_ids),
        )
        if request.beams is not None:
            group.num_unfinished = 1
            group.is_forked = True  # no samples: its beams fork in rounds of their own
        self.blocks.name_blocks(root)
        try:
            self._register(root)
        except Exception:
            self.policy.note_end(group)
            raise
        self.groups[request.request_id] = group
        return root

    def seat(self, sequence: Sequence) -> None:
        """Let a waiting or swapped sequence run."""
        self._unqueue(sequence)
        sequence.num_passes = 0
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def preempt(self, victim: Sequence) -> bool:
        """Take a sequence's blocks and its seat; return whether the host tier has what it computed."""
        is_paused = victim.status is SequenceStatus.PAUSED  # a short wait, often on shared blocks
        is_kept = not is_paused and self.blocks.swap_out(victim)
        if not is_kept:
            self.blocks.free(victim.seq_id)
            self._name_again(victim)
        self._await_return(victim)
        if is_kept:
            victim.status = SequenceStatus.SWAPPED
            self.swapped[victim.seq_id] = victim
        return is_kept

    def lose(self, lost: LostMoves, scheduled: Iterable[int]) -> set[int]:
        """Take back what hung on moves that were not done; return whose results do not count.

        `scheduled` are the ids of the step that the moves belong to.
        """
        bad, hit = self.blocks.lose(lost)
        void = {i for i in scheduled if self.blocks.holds_any(i, bad)}
        for seq_id in (*hit, *void):
            self.blocks.free(seq_id)
            self._name_again(self.sequences[seq_id])
            self._await_return(self.sequences[seq_id])
        return void

    def forget_prefixes(self) -> bool:
        """Let nothing be found that was computed until now; return whether a tier that lasts has to hear of it.

        What a sequence has computed it goes on with, wherever it comes back from, and nobody else does.
        """
        for sequence in self.sequences.values():
            has_begun = sequence.num_computed or sequence.num_scheduled
            if has_begun or sequence.seq_id in self.swapped:
                sequence.is_nameless = True
                sequence.block_names = []
                sequence.more_names = []
        return self.blocks.forget_prefixes()

    def _name_again(self, sequence: Sequence) -> None:
        """Let a sequence's blocks be found again: all of them will be computed anew."""
        if sequence.is_nameless:
            sequence.is_nameless = False
            self.blocks.name_blocks(sequence)

    def _await_return(self, sequence: Sequence) -> None:
        """Let a sequence wait, with nothing computed; a paused beam waits for its mates already."""
        if sequence.status is SequenceStatus.PAUSED:
            sequence.num_computed = 0
            sequence.num_preemptions += 1
            return
        self._unqueue(sequence)
        sequence.num_computed = 0
        sequence.num_scheduled = 0
        sequence.num_preemptions += 1
        self._drop_row(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def _unqueue(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is not SequenceStatus.PAUSED:
            self.waiting.remove(sequence)
            self.swapped.pop(sequence.seq_id, None)

    def pause(self, beam: Sequence) -> None:
        """Take a computed beam's seat; it keeps its blocks."""
        self.running.remove(beam)
        self._drop_row(beam)
        beam.status = SequenceStatus.PAUSED

    def enter_fork(self, parent: Sequence, child: Sequence) -> None:
        """Queue what continues a paused beam, on its blocks; seat it at once if a seat is free."""
        child.group.num_unfinished += 1
        if self.blocks.table(parent.seq_id):  # else it was preempted while it waited
            self.blocks.fork(parent.seq_id, child.seq_id)
        self.blocks.name_blocks(child)
        self._register(child)
        self.seat_fork(child)

    def fork(self, root: Sequence) -> list[Sequence]:
        """Make the other samples of a request whose prompt is computed; they hold its blocks."""
        forks = []
        for index in range(1, root.group.request.num_samples):
            fork = root.fork(self.seq_ids.take(), index)
            self._register(fork)
            self.blocks.fork(root.seq_id, fork.seq_id)
            forks.append(fork)
        return forks

    def seat_fork(self, fork: Sequence) -> None:
        """Seat a fork at once if a seat is free: it is a decode, and should not wait for prompts."""
        if len(self.running) < self._max_num_seqs:
            self.seat(fork)

    def end(
        self,
        sequence: Sequence,
        reason: str,
        stop_reason: int | str | None = None,
        *,
        token_ids: tuple[int, ...] = (),
        scores: tuple[TokenScores, ...] = (),
        prompt_scores: tuple[TokenScores, ...] = (),
        error: str | None = None,
    ) -> SequenceUpdate:
        """Take a sequence out of everything and free its blocks."""
        self.blocks.free(sequence.seq_id)
        self._unqueue(sequence)
        self._drop_row(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_scheduled = 0
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        group = sequence.group
        del self.sequences[sequence.seq_id]
        del group.sequences[sequence.seq_id]
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            del self.groups[group.request_id]
            self.policy.note_end(group)
        return news(
            sequence,
            token_ids=token_ids,
            scores=scores,
            prompt_scores=prompt_scores,
            error=error,
        )

    def end_group(
        self,
        group: SequenceGroup,
        reason: str,
        *,
        prompt_scores: tuple[TokenScores, ...] = (),
        error: str | None = None,
    ) -> list[SequenceUpdate]:
        """End every unfinished sample of a request; the root's update carries `prompt_scores`."""
        if not group.is_forked:  # samples that are a number only get their end too
            root = next(iter(group.sequences.values()))
            for index in range(1, group.request.num_samples):
                fork = root.fork(self.seq_ids.take(), index)
                self._register(fork)
            group.is_forked = True
        updates = [
            self.end(
                sequence,
                reason,
                prompt_scores=prompt_scores if sequence.sample_index == 0 else (),
                error=error,
            )
            for sequence in list(group.sequences.values())
        ]
        if group.request.beams is None:
            return updates
        samples = range(group.request.num_samples)  # what the caller waits for, whatever ran
        return [replace(updates[0], sample_index=index) for index in samples]

    def break_off(self, group: SequenceGroup, error: Exception) -> list[SequenceUpdate]:
        """End a request of which nothing but its sequences can be trusted; return an end of each sample."""
        for sequence in list(group.sequences.values()):
            self.blocks.free(sequence.seq_id)
            self._unqueue(sequence)
            self._drop_row(sequence)
            sequence.status = SequenceStatus.FINISHED
            sequence.num_scheduled = 0
            del self.sequences[sequence.seq_id]
            del group.sequences[sequence.seq_id]
        group.num_unfinished = 0
        if self.groups.pop(group.request_id, None) is not None:
            self.policy.note_end(group)
        return [
            SequenceUpdate(
                seq_id=self.seq_ids.take(),
                request_id=group.request_id,
                sample_index=index,
                finish_reason="error",
                error=failure_text(error),
            )
            for index in range(group.request.num_samples)
        ]

    def note_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Tell the policy that positions [start, end) are computed, and how many for the first time."""
        num_new = end - max(start, sequence.num_served)
        if num_new > 0:
            sequence.num_served = end
        else:
            num_new = 0
        self.policy.note_computed(sequence, start, end, num_new)

    def take_removed(self) -> tuple[int, ...]:
        """Return the rows that the ranks may drop, once."""
        removed = tuple(self._removed)
        self._removed.clear()
        return removed

    def _drop_row(self, sequence: Sequence) -> None:
        if sequence.has_row:
            sequence.has_row = False
            self._removed.append(sequence.seq_id)

    def _register(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        self.sequences[sequence.seq_id] = sequence
        sequence.group.sequences[sequence.seq_id] = sequence


def news(
    sequence: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    scores: tuple[TokenScores, ...] = (),
    prompt_scores: tuple[TokenScores, ...] = (),
    error: str | None = None,
) -> SequenceUpdate:
    """Return what changed for a sequence, with its state as it is now."""
    return SequenceUpdate(
        seq_id=sequence.seq_id,
        request_id=sequence.group.request.request_id,
        sample_index=sequence.sample_index,
        token_ids=token_ids,
        scores=scores,
        prompt_scores=prompt_scores,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        first_scheduled_time=sequence.first_scheduled_time,
    )


def failure_text(error: Exception) -> str:
    """Return what a request is told that ends because this wing has failed on it."""
    return f"the engine failed on this request: {words_of(error)}"
