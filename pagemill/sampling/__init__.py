"""From logits to tokens: masks, penalties, truncation, draws and logprobs.

`sampler.Sampler` is the only door; the worker calls it once a step. Every result of a row is a function
of that row alone: reductions run along one row in one fixed order, whatever rows travel with it.
"""
