"""A layout never changes the result: loss, gradients, their norm, and the policy after one update, against one process."""

import functools
import math

import numpy as np
import pytest
import torch

from megarl.objectives import make_objective
from tests.parallel.parity import Case, differences, rollouts, run

pytestmark = pytest.mark.system

SHARDED = {"distributed": True}
OVERLAPPED = {"distributed": True, "overlap": True}
GSPO, LPO = {"name": "gspo"}, {"name": "lpo"}
TP2, TP2_SP = {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}
PP2, VPP2 = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
CP2, DP2 = {"context": 2}, {"data": 2}

# Every row runs padded and packed, in fp32 and in bf16; those of four ranks are padded or packed as they say.
ROWS = {
    "one": {},
    "one, small micro-batches": {"max_tokens": 16},
    "one, nothing skipped": {"skip": False},
    "one, logits in chunks": {"chunk_tokens": 5},
    "one, full recompute": {"recompute": "full"},
    "one, selective recompute": {"recompute": "selective"},
    "TP2": {"layout": TP2},
    "TP2+SP": {"layout": TP2_SP},
    "TP2+SP, logits in chunks": {"layout": TP2_SP, "chunk_tokens": 5},
    "TP2+SP, full recompute": {"layout": TP2_SP, "recompute": "full"},
    "PP2": {"layout": PP2},
    "PP2, logits in chunks": {"layout": PP2, "chunk_tokens": 5},
    "PP2, untied": {"layout": PP2, "model": "llama_untied"},
    "PP2, biases": {"layout": PP2, "model": "qwen2_tied"},
    "PP2, small micro-batches": {"layout": PP2, "max_tokens": 24},
    "PP2·VPP2": {"layout": VPP2},
    "PP2·VPP2, small micro-batches": {"layout": VPP2, "max_tokens": 24},
    "PP2·VPP2, full recompute": {"layout": VPP2, "recompute": "full"},
    "CP2": {"layout": CP2},
    "CP2, selective recompute": {"layout": CP2, "recompute": "selective"},
    "CP2, GSPO": {"layout": CP2, "objective": GSPO},
    "DP2": {"layout": DP2},
    # Micro-batches of one or two sequences: every group is split, over the ranks too.
    "DP2, LPO by a prepass": {"layout": DP2, "objective": LPO, "prepass": True, "max_tokens": 40},
    "CP2, LPO by a prepass": {"layout": CP2, "objective": LPO, "prepass": True, "max_tokens": 40},
    "PP2, LPO": {"layout": PP2, "objective": LPO},
    "DP2, sharded optimizer": {"layout": DP2, "optimizer": SHARDED},
    "DP2, overlap": {"layout": DP2, "optimizer": OVERLAPPED},
    "PP2·VPP2, overlap": {"layout": VPP2, "optimizer": OVERLAPPED},
    "CP2, sharded optimizer": {"layout": CP2, "optimizer": SHARDED},
    "experts": {"model": "experts"},
    "experts, DP2": {"model": "experts", "layout": DP2},
    "experts, TP2+SP": {"model": "experts", "layout": TP2_SP},
    "experts, DP2·ETP2": {"model": "experts", "layout": DP2 | {"expert_tensor": 2}},
    "experts, DP2·EP2": {"model": "experts", "layout": DP2 | {"expert": 2}},
    "experts, DP2·EP2, overlap": {"model": "experts", "layout": DP2 | {"expert": 2}, "optimizer": OVERLAPPED},
    "experts, CP2·EP2": {"model": "experts", "layout": CP2 | {"expert": 2}},
    "experts, TP2+SP·EP2": {"model": "experts", "layout": TP2_SP | {"expert": 2}},
    "experts, TP2+SP·ETP2": {"model": "experts", "layout": TP2_SP | {"expert_tensor": 2}},
}
ROWS_OF_FOUR = {
    "TP2·PP2": {"layout": TP2 | PP2},
    "TP2+SP·PP2·VPP2, packed": {"layout": TP2_SP | VPP2, "packing": True},
    "TP2+SP·CP2": {"layout": TP2_SP | CP2},
    "TP2+SP·CP2, packed": {"layout": TP2_SP | CP2, "packing": True},
    "PP2·CP2, packed": {"layout": PP2 | CP2, "packing": True},
    "DP2·CP2, overlap": {"layout": DP2 | CP2, "optimizer": OVERLAPPED},
    "CP4, packed": {"layout": {"context": 4}, "packing": True},
    "experts, PP2·DP2·EP2, packed": {"model": "experts", "layout": PP2 | DP2 | {"expert": 2}, "packing": True},
    "experts, DP4·EP2, sharded optimizer": {"model": "experts", "layout": {"data": 4, "expert": 2}, "optimizer": SHARDED},
}

# fp32: what another order of summation makes of numbers near 1; a fault is far above it (see `test_a_planted_fault_is_noticed`).
FP32 = {"loss": 1e-5, "grad_norm": 1e-5, "clipped": 0, "gradient": 1e-5, "logp": 1e-5, "token_kinds": 1e-5}
# bf16: every rounding errs by up to 2^-9 = 0.2%, and layouts round in other places. What a few dozen roundings on the way through four
# layers do is measured by one process in bf16 against one in fp32, which must stay within half of this
# (`test_bf16_is_half_its_tolerance_from_fp32`); two layouts that are each so far from fp32 are at most all of it from each other. The
# objective is one without clipping: a ratio at the edge of a clip range changes sides by any rounding, and so does a token at the border
# of two kinds. Its loss is a mean over 24 responses of sums of log-probs, 170 in all: errors of 0.02 each make one of
# 0.02 * sqrt(170) / 24 = 0.01.
BF16 = {"loss": 1e-2, "grad_norm": 1e-2, "clipped": 0, "gradient": 5e-2, "logp": 4e-2, "token_kinds": math.inf}
SMOOTH = {"name": "rloo"}
BF16_ROWS = {name: row | {"objective": SMOOTH} for name, row in (ROWS | ROWS_OF_FOUR).items() if "objective" not in row}


@pytest.fixture(scope="module")
def case(tiny_models):
    def make(model="qwen3_tied", layout=None, objective=None, **others):
        return Case(model=str(tiny_models[model]), layout=layout or {}, objective=objective or {"name": "grpo"}, **others)

    return make


@pytest.fixture(scope="module")
def one_process(case):
    @functools.cache
    def reference(model, objective, precision):
        return run(case(model=model, objective={"name": objective}, precision=precision))

    return lambda row, precision="fp32": reference(
        row.get("model", "qwen3_tied"), row.get("objective", {"name": "grpo"})["name"], precision
    )


def assert_agree(got, want, limits):
    found = differences(got, want)
    over = {name: value for name, value in found.items() if not value <= limits[name]}
    assert not over, f"{over} of {found}; at most {limits}"


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("row", ROWS)
def test_fp32(case, one_process, row, packing):
    want = one_process(ROWS[row])
    assert want.clipped > 0  # else the check would miss what clipping does
    assert_agree(run(case(**ROWS[row], packing=packing)), want, FP32)


@pytest.mark.parametrize("row", ROWS_OF_FOUR)
def test_fp32_on_four_ranks(case, one_process, row):
    assert_agree(run(case(**ROWS_OF_FOUR[row])), one_process(ROWS_OF_FOUR[row]), FP32)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("row", [row for row in BF16_ROWS if row in ROWS])
def test_bf16(case, one_process, row, packing):
    row = BF16_ROWS[row]
    assert_agree(run(case(**row, packing=packing, precision="bf16")), one_process(row, "bf16"), BF16)


@pytest.mark.parametrize("row", [row for row in BF16_ROWS if row in ROWS_OF_FOUR])
def test_bf16_on_four_ranks(case, one_process, row):
    row = BF16_ROWS[row]
    assert_agree(run(case(**row, precision="bf16")), one_process(row, "bf16"), BF16)


@pytest.mark.parametrize("model", ["qwen3_tied", "llama_untied", "qwen2_tied", "experts"])
def test_bf16_is_half_its_tolerance_from_fp32(one_process, model):
    row = {"model": model, "objective": SMOOTH}
    assert_agree(one_process(row, "bf16"), one_process(row), {name: limit / 2 for name, limit in BF16.items()})


@pytest.mark.parametrize("model", ["qwen3_untied", "qwen2_tied", "llama_untied", "experts", "experts_unnormalized"])
def test_one_process_agrees_with_hugging_face(case, one_process, tiny_models, model):
    from transformers import AutoModelForCausalLM

    sequences, batch = rollouts()
    objective = make_objective({"name": "grpo"})
    update = objective.begin_update(objective.prepare(batch))
    hugging_face = AutoModelForCausalLM.from_pretrained(tiny_models[model], dtype=torch.float32)
    parts = []
    for row in range(len(sequences)):
        ids = torch.from_numpy(sequences.tokens[sequences.starts[row] : sequences.starts[row + 1]])[None]
        prompt = int(sequences.prompt_lengths[row])
        logp = torch.log_softmax(hugging_face(ids).logits[0, prompt - 1 : -1] / 0.8, -1)
        parts.append(logp.gather(1, ids[0, prompt:, None])[:, 0])
    loss = objective.loss(update, torch.arange(batch.num_tokens), torch.cat(parts)).loss
    loss.backward()
    got, want = one_process({"model": model}), gradients_by_name(hugging_face)
    assert got.loss == pytest.approx(loss.item(), abs=1e-5)
    assert want.keys() == got.gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in want.values())
    for name, gradient in want.items():
        assert np.abs(got.gradients[name] - gradient).max() <= 1e-5 * largest, name


def gradients_by_name(model):
    """Gradients under the names of the folder: transformers keeps the experts of a layer in one tensor and writes them apart."""
    gradients = {}
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(parameter.grad):
                for half, gradient in zip(("gate", "up"), both.chunk(2), strict=True):
                    gradients[f"{stem}.{expert}.{half}_proj.weight"] = gradient.numpy()
        elif stem.endswith("experts"):
            gradients |= {f"{stem}.{expert}.down_proj.weight": gradient.numpy() for expert, gradient in enumerate(parameter.grad)}
        else:
            gradients[name] = parameter.grad.numpy()
    return gradients


FAULTS = [
    ("wrong_denominator_on_one_rank", "DP2", False),
    ("loss_divided_by_the_number_of_micro_batches", "one, small micro-batches", False),
    ("gradients_averaged_over_data_ranks", "DP2", False),
    ("gradients_averaged_over_data_ranks", "CP2", False),
    ("gradients_divided_by_the_number_of_tokens", "DP2", False),
    ("loss_multiplied_by_the_context_ranks", "CP2", True),
    ("gradients_not_finalized", "DP2", True),
    ("gradients_not_finalized", "CP2", True),
    ("norm_gradients_not_summed_under_sequence_parallelism", "TP2+SP", False),
    ("experts_reduced_like_other_parameters", "experts, TP2+SP", False),
    ("experts_reduced_like_other_parameters", "experts, DP2·ETP2", True),
    ("tied_embedding_gradients_not_summed", "PP2", False),
    ("tied_embedding_gradients_not_summed", "PP2·VPP2", True),
    ("key_and_value_gradients_stay_on_their_context_rank", "CP2", False),
    ("key_and_value_gradients_stay_on_their_context_rank", "CP2", True),
    ("replicated_parameters_counted_twice_in_the_norm", "TP2", False),
    ("labels_shifted_after_the_context_split", "CP2", False),
    ("labels_shifted_after_the_context_split", "CP2", True),
    ("context_ranks_take_the_same_tokens", "CP2", False),
    ("last_micro_batch_dropped_on_one_rank", "DP2", True),
    ("packed_sequences_see_each_other", "one", True),
    ("padding_of_the_vocabulary_in_the_softmax", "one", False),
    ("rotary_positions_not_split_over_context_ranks", "CP2", False),
    ("rotary_positions_not_split_over_context_ranks", "CP2", True),
    ("dropout_left_on", "one", False),
    ("interleaved_stages_send_in_batches", "PP2·VPP2, small micro-batches", False),
    ("stale_scalars", "CP2, GSPO", False),
    ("scalars_of_one_context_rank_only", "CP2, GSPO", True),
]


@pytest.mark.parametrize("fault, row, packing", FAULTS)
def test_a_planted_fault_is_noticed(case, one_process, fault, row, packing):
    got = run(case(**ROWS[row], packing=packing, fault=fault))
    with pytest.raises(AssertionError, match="at most"):
        assert_agree(got, one_process(ROWS[row]), FP32)
