"""Single operations on tensors, without knowledge of models, blocks or batches.

`reference` holds each one in plain torch. Called by `layers` and `attention`.
"""
