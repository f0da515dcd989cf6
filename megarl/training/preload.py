"""Imported once by the process that local ranks are forked from (local_ranks.py): a rank then starts with everything loaded."""

# ruff: noqa: E402, F401
import gc

from megarl import platform

platform.prepare_megatron()

import megatron.core.dist_checkpointing

import megarl.config.recipe
import megarl.models.hf_weights
import megarl.models.policy
import megarl.objectives
import megarl.training.checkpoint
import megarl.training.optimizer
import megarl.training.rank
import megarl.training.step

# A collection in a fork would write to every object's header, and so copy the memory that forks share.
gc.freeze()
