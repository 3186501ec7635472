"""The planning wing: decides who runs and in which blocks, never computes; no torch.

`scheduler` is the face the engine uses; the other files are its parts:

    sequence        one sample of a request, its three counts and times; the group of a request
    sequence_queue  sequences in the order of a policy
    roster          who is here: sequences, queues, blocks; every change of a sequence's state
    planner         pure: plan_step(view, limits, policy) -> StepPlan
    preemption      pure: who gives way when blocks run short
    block_pool      ref counts, the free list, and the index of what blocks hold
    prefix_cache    names of block contents: chained hashes
    block_manager   block tables; commits what the planner planned
    step_commit     a plan becomes blocks, counts and the message to the ranks
    step_results    what the ranks computed becomes tokens, forks and ends
    deadlines       which requests have run out of time
    stop_checker    pure: token stops and string stops
    policies/       order of admission and of preemption
"""
