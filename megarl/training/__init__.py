"""The trainer: one process per Megatron rank, the plan of its micro-batches, its step, its checkpoints."""
