"""Mistakes that trainers make, each as a patch of a rank that is about to do an update. They die with the rank's process.

Every function here is planted by name (`Case.fault`), and `test_parity.py` asserts that the parity check notices it.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch.distributed as dist


def _wrap(owner, name, wrapper):
    """Replace `owner.name` by a function that is given the original first."""
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))


def _after_wrapping(change):
    """Call `change(config)` on Megatron's configuration once the model is wrapped in DDP."""
    from megarl.training import step

    def wrap(original, chunks, settings):
        wrapped = original(chunks, settings)
        change(wrapped[0].config)
        return wrapped

    _wrap(step, "wrap_for_training", wrap)


def _change_batches(change):
    """`change(batch, rows, plan, context_rank)` gives what the ranks get instead of the batch."""
    from megarl.training import step

    def collate(original, sequences, rows, plan, context_rank=0):
        return change(original(sequences, rows, plan, context_rank), rows, plan, context_rank)

    _wrap(step, "collate", collate)


# ---------------------------------------------------------------- scale


def wrong_denominator_on_one_rank():
    from megarl.objectives import Objective

    def begin_update(original, self, *arguments):
        update = original(self, *arguments)
        return dataclasses.replace(update, surrogate_scale=update.surrogate_scale * 1.1) if dist.get_rank() == 1 else update

    original = Objective.begin_update
    Objective.begin_update = lambda self, *arguments: begin_update(original, self, *arguments)


def loss_divided_by_the_number_of_micro_batches():
    _after_wrapping(lambda config: setattr(config, "calculate_per_token_loss", False))


def gradients_averaged_over_data_ranks():
    from megarl.training import step

    def wrap(original, chunks, settings):
        chunks[0].config.calculate_per_token_loss = False
        wrapped = original(chunks, settings)
        chunks[0].config.calculate_per_token_loss = True
        return wrapped

    _wrap(step, "wrap_for_training", wrap)


def gradients_divided_by_the_number_of_tokens():
    from megatron.core.distributed import finalize_model_grads

    _after_wrapping(lambda config: setattr(config, "finalize_model_grads_func", finalize_model_grads))


def loss_multiplied_by_the_context_ranks():
    from megarl.objectives import Objective

    original = Objective.loss

    def loss(self, *arguments, **others):
        result = original(self, *arguments, **others)
        return dataclasses.replace(result, loss=2 * result.loss)

    Objective.loss = loss


# ---------------------------------------------------------------- reductions that are left out


def gradients_not_finalized():
    _after_wrapping(lambda config: setattr(config, "finalize_model_grads_func", lambda *arguments, **others: None))


def norm_gradients_not_summed_under_sequence_parallelism():
    from megatron.core.distributed import finalize_model_grads  # the function hides the module of its name

    finalize_model_grads.__globals__["_allreduce_non_tensor_model_parallel_grads"] = lambda *arguments: None


def tied_embedding_gradients_not_summed():
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads.__globals__["_allreduce_word_embedding_grads"] = lambda *arguments: None


def experts_reduced_like_other_parameters():
    from megarl.training import step

    def wrap(original, chunks, settings):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.allreduce = True
        return original(chunks, settings)

    _wrap(step, "wrap_for_training", wrap)


def key_and_value_gradients_stay_on_their_context_rank():
    from megarl.models import layers

    def gather(original, local, tensor_parallel_output_grad, group):
        return original(local, tensor_parallel_output_grad=False, group=group)

    _wrap(layers, "gather_from_sequence_parallel_region", gather)


def replicated_parameters_counted_twice_in_the_norm():
    from megarl.training import rank, step  # noqa: F401

    def wrap(original, chunks, settings):
        wrapped = original(chunks, settings)
        for parameter in wrapped[0].parameters():
            parameter.tensor_model_parallel = True
        return wrapped

    _wrap(step, "wrap_for_training", wrap)


# ---------------------------------------------------------------- tokens


def labels_shifted_after_the_context_split():
    def change(batch, rows, plan, context_rank):
        following = np.roll(batch.tokens, -1, 1).T.reshape(-1)
        return dataclasses.replace(batch, labels=following[batch.positions])

    _change_batches(change)


def context_ranks_take_the_same_tokens():
    from megarl.training import step

    class FirstRank:
        def __getattr__(self, name):
            return getattr(step_state, name)

        def get_context_parallel_rank(self):
            return 0

    step_state = step.parallel_state
    step.parallel_state = FirstRank()


def last_micro_batch_dropped_on_one_rank():
    from megarl.training import step

    def collate(original, sequences, rows, plan, context_rank=0):
        last = dist.get_rank() == 0 and rows == plan.rows[0][-1]
        return original(sequences, () if last else rows, plan, context_rank)

    _wrap(step, "collate", collate)


def packed_sequences_see_each_other():
    def change(batch, rows, plan, context_rank):
        return dataclasses.replace(batch, cu_seqlens_padded=batch.cu_seqlens_padded[[0, -1]])

    _change_batches(change)


def padding_of_the_vocabulary_in_the_softmax():
    from megarl.training.rank import TrainingRank

    run = TrainingRank._run

    def with_padding(self, *arguments, **others):
        config = self.config
        self.config = dataclasses.replace(config, shape=dataclasses.replace(config.shape, vocab_size=128))
        try:
            return run(self, *arguments, **others)
        finally:
            self.config = config

    TrainingRank._run = with_padding


# ---------------------------------------------------------------- model


def rotary_positions_not_split_over_context_ranks():
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda table, dim, group: table[: len(table) // group.size()]
    rope_utils._get_thd_freqs_on_this_cp_rank = lambda rank, size, x, table, offset=0: table[: len(x)]


def dropout_left_on():
    from megarl.models import policy

    def config(original, *arguments, **others):
        config = original(*arguments, **others)
        config.hidden_dropout = 0.1
        return config

    _wrap(policy, "transformer_config", config)


def interleaved_stages_send_in_batches():
    from megarl.models import policy

    def config(original, *arguments, **others):
        config = original(*arguments, **others)
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
        return config

    _wrap(policy, "transformer_config", config)


def weights_exported_before_they_are_gathered():
    from megarl.training import step

    step.complete_weights = lambda chunks: None


# ---------------------------------------------------------------- coupled objectives


def stale_scalars():
    """The sequence ratios of the policy that sampled, instead of the current one's."""
    from megarl.objectives import Objective

    current = Objective.scalars
    Objective.scalars = lambda self, update, index, logp: current(self, update, index, update.prepared.old_logp[index].to(logp))


def scalars_of_one_context_rank_only():
    from megarl.training import step

    def own_part(sums):
        if sums is None:
            return None
        # The count says how many tokens are in the sum; a trainer without it would go on with what it has.
        everyone = sums.packed()
        dist.all_reduce(everyone)
        return type(sums)(sums.total, everyone[1])

    step.sum_over_context = own_part


def plant(name: str | None) -> None:
    """Plant a fault by name in this process; None: nothing."""
    if name is not None:
        globals()[name]()
