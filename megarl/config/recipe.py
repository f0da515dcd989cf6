"""The recipe: everything a run is told, as typed and torch-free models.

Unknown keys are errors. The text under a field is its documentation (`megarl show --fields`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the recipe: immutable, and no key is accepted that is not declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Engines sample as at 0.01 below it and refuse more than 2.
Temperature = Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Model(Section):
    path: Text
    """Hugging Face folder (config.json, safetensors, tokenizer) that the policy starts from."""
    pad_vocab_to_multiple_of: PositiveInt = 64
    """The vocabulary is padded to a multiple of this times the tensor-parallel size; the padding is never sampled or exported."""


class Data(Section):
    train: Text | Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    """Training prompts: a JSONL, Parquet or Arrow file, a pattern such as data/train-*, or a folder of Hugging Face datasets.
    A mapping of such paths to weights is a mixture: each source has its share of every step."""
    evaluation: dict[str, Text] = {}
    """Held-out files by name; their metrics carry the name unless there is one file only."""
    columns: dict[str, Text] = {}
    """Which column is `prompt`, `answer`, `id`, `demonstrations` or `metadata`, such as {prompt: question, answer: reward_model.truth}.
    The others go into the metadata. Without it, the columns have these names."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template. A prompt that is a list of messages is always rendered with it."""
    max_prompt_length: PositiveInt = 1024
    """In tokens."""
    too_long: Literal["error", "drop", "cut_left"] = "error"
    """What happens to a prompt above `max_prompt_length`: stop with its line, leave it out, or cut its beginning off."""
    shuffle: bool = True

    @property
    def sources(self) -> dict[str, float]:
        """The paths of the training data and their weights."""
        return self.train if isinstance(self.train, dict) else {self.train: 1.0}


class Verifier(Section):
    name: Text
    """`countdown`, `math`, `maze`, `multi_hop`, `python_tests`, `reasoning_gym`, `tool_calls` (docs/tasks.md), or the import path
    `package.module:function` of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the verifier (docs/tasks.md)."""
    workers: PositiveInt | None = None
    """Processes that judge at the same time. Default: one per core."""
    timeout_s: PositiveFloat = 10.0
    """Longest time for one response; then its verdict is `timeout`."""
    memory_mib: PositiveInt = 2048
    """What a worker may allocate beside the loaded verifier."""
    on_timeout: Literal["zero", "drop"] = "zero"
    """`zero`: the reward is 0. `drop`: the response leaves the loss and its group's statistics."""
    on_crash: Literal["zero", "drop"] = "drop"
    """As `on_timeout`, for a verifier that failed."""
    max_timeout_share: Fraction = 0.5
    """The run stops where a larger share of a step's verdicts is `timeout`."""
    max_crash_share: Fraction = 0.1
    """As `max_timeout_share`, for `crash`."""


class Rollout(Section):
    engines: PositiveInt = 1
    """Number of vLLM engines."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    prompts_per_step: PositiveInt = 64
    responses_per_prompt: PositiveInt = 8
    max_response_length: PositiveInt = 1024
    """In tokens, the end-of-sequence token included."""
    temperature: Temperature = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_concurrent_sequences: PositiveInt = 256
    """Sequences that one engine decodes at the same time."""
    kv_cache_mib: PositiveInt | None = None
    """KV cache of one engine. Default: sized for `max_concurrent_sequences` on a CPU, the engine's own choice on a GPU."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    prefix_caching: bool = True
    overlap_training: bool = False
    """Start a mini-batch as soon as its prompts are answered, while the engine answers the others.
    Needs an objective without statistics over the whole batch and `old_logprobs: rollout`."""


class Layout(Section):
    """How one model is spread over `tensor * pipeline * context * data` ranks. The result does not depend on it."""

    tensor: PositiveInt = 1
    """Ranks that share every matrix."""
    sequence_parallel: bool = False
    """Also share the activations between the matrices over the tensor ranks, along the sequence."""
    pipeline: PositiveInt = 1
    """Stages of layers, one after another."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers per stage: more of them leave smaller gaps in the pipeline and send more."""
    context: PositiveInt = 1
    """Ranks that share every sequence."""
    data: PositiveInt = 1
    """Copies of the model, each with its share of the sequences."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model, out of the tensor, context and data ranks."""
    expert_tensor: PositiveInt = 1
    """Ranks that share the matrices of one expert."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        """What is not at its default: `tensor 2 × data 4`; `one copy` if nothing is."""
        sizes = [f"{name} {size}" for name, size in self.model_dump().items() if name != "sequence_parallel" and size > 1]
        return " × ".join(sizes) + (", sequence parallel" if self.sequence_parallel else "") or "one copy"

    @model_validator(mode="after")
    def _dimensions_agree(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("`sequence_parallel` needs `tensor` > 1")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("`virtual_pipeline` needs `pipeline` > 1")
        ranks, experts = self.tensor * self.context * self.data, self.expert * self.expert_tensor
        if ranks % experts:
            raise ValueError(f"`expert` x `expert_tensor` is {experts}; it must divide `tensor` x `context` x `data`, which is {ranks}")
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            raise ValueError("`expert` > 1 together with `tensor` > 1 needs `sequence_parallel`")
        return self


class Optimizer(Section):
    learning_rate: PositiveFloat = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up; a step is a step of the run, whatever the number of mini-batches in it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `final_fraction` at the last step."""
    final_fraction: Fraction = 0.0
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    distributed: bool = False
    """Shard the optimizer state over the data-parallel ranks."""
    overlap: bool = False
    """Reduce gradients during the backward pass and gather the new weights during the next forward pass. Needs `distributed`."""

    @model_validator(mode="after")
    def _overlap_needs_distributed(self) -> Self:
        if self.overlap and not self.distributed:
            raise ValueError("`overlap` needs `distributed`")
        return self


class StepLists(Section):
    separators: Annotated[list[Text], Field(min_length=1)]
    """A token whose text holds one of these ends a segment."""


class Training(Section):
    steps: PositiveInt
    minibatches: PositiveInt = 1
    """Optimizer updates per step; the prompts of a step are split evenly, in order."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens (padding included) in one forward pass of one rank."""
    packing: bool = False
    """Put the sequences of a micro-batch one after another instead of padding each to the longest."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes anew: none, the attention's, or all but each layer's input."""
    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at a time. Default: as many as take 256 MiB in fp32; the softmax needs about twice that."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 keeps fp32 master weights and gradients."""
    old_logprobs: Literal["rollout", "recompute"] = "recompute"
    """`recompute`: a forward pass of the policy before the first update (none if there is one update only: it is exact without).
    `rollout`: the engine's own, exact up to the mismatch that the run measures at every step."""
    skip_without_signal: bool = True
    """Leave responses whose loss has no gradient out of the passes. Exact: they stay in every statistic and denominator."""
    listwise_scalars: Literal["auto", "micro_batch", "prepass"] = "auto"
    """Where an objective that compares a group's responses gets its coefficients from: `micro_batch` keeps the group in one micro-batch,
    `prepass` runs a forward pass before each update. The same result; auto: micro_batch if every group fits in `micro_batch_tokens`."""
    step_lists: StepLists | None = None
    """Compare segments of responses that continue the same prefix instead of whole responses (listwise objectives)."""
    layout: Layout = Layout()
    optimizer: Optimizer = Optimizer()
    threads_per_rank: PositiveInt | None = None
    """CPU threads of one rank. Default: the machine's cores over the ranks on it."""


class Replay(Section):
    """Groups of earlier steps, trained on again while they are fresh enough (objective `lpo`)."""

    capacity: PositiveInt = 512
    """Groups that are kept, the newest."""
    groups_per_step: PositiveInt = 16
    """Groups added to each step's own."""
    max_age: PositiveInt = 4
    """In steps since a group was sampled."""
    max_drift: PositiveFloat = 0.5
    """Groups with a response whose mean log-ratio against its sampler is above this, in nats per token, are left out."""
    priority: NonNegativeFloat = 1.0
    """A group is drawn in proportion to the std of its rewards to this power; 0: uniformly."""
    age_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """... and to this to the power of its age."""
    kl_pull: NonNegativeFloat = 0.0
    """Per step of age: the older the group, the nearer its target to the present policy."""


class Diagnostics(Section):
    every: NonNegativeInt = 10
    """In steps; 0: never. Metrics that need more than the loss does: the kinds of tokens that the step learns from (docs/methods.md)."""


class Evaluation(Section):
    every: NonNegativeInt = 10
    """In steps; 0: never. The weights before the first and after the last step are always evaluated unless it is 0."""
    responses_per_prompt: PositiveInt = 8
    k: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]
    """pass@k is reported for each; every one different and none above `responses_per_prompt`."""
    temperature: Temperature = 1.0
    max_prompts: PositiveInt | None = None

    @model_validator(mode="after")
    def _k_is_usable(self) -> Self:
        twice = next((k for k in self.k if self.k.count(k) > 1), None)
        if twice is not None:
            raise ValueError(f"`k` holds {twice} twice")
        if max(self.k) > self.responses_per_prompt:
            raise ValueError(f"pass@{max(self.k)} of `k` needs `responses_per_prompt` >= {max(self.k)}")
        return self


class Checkpoint(Section):
    every: NonNegativeInt = 0
    """In steps; 0: only at the end and when the run is told to stop."""
    keep: PositiveInt = 2


class Recipe(Section):
    """A reinforcement-learning run: `megarl train RECIPE`."""

    seed: Seed = 0
    output: Text
    """Folder of the run; it must not exist unless the run is resumed."""
    model: Model
    data: Data
    verifier: Verifier
    objective: dict[str, Any]
    """`name` and the parameters of the objective (docs/methods.md)."""
    rollout: Rollout = Rollout()
    replay: Replay | None = None
    """Train again on groups of earlier steps. Null: each group is used in its own step only."""
    training: Training
    diagnostics: Diagnostics = Diagnostics()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.rollout.prompts_per_step % self.training.minibatches:
            raise ValueError("`rollout.prompts_per_step` must be a multiple of `training.minibatches`")
        if self.rollout.overlap_training and self.training.old_logprobs != "rollout":
            raise ValueError("`rollout.overlap_training` needs `training.old_logprobs` to be rollout")
        if self.replay is not None and self.rollout.overlap_training:
            raise ValueError("`replay` cannot be used together with `rollout.overlap_training`")
        return self


class SftTraining(Section):
    steps: PositiveInt
    batch_size: PositiveInt = 64
    """Examples per update."""
    micro_batch_tokens: PositiveInt = 16384
    packing: bool = False
    """Put the sequences of a micro-batch one after another instead of padding each to the longest."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes anew: none, the attention's, or all but each layer's input."""
    logprob_chunk_tokens: PositiveInt | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    layout: Layout = Layout()
    optimizer: Optimizer = Optimizer()
    threads_per_rank: PositiveInt | None = None


class SftRecipe(Section):
    """Supervised warm-up on worked examples: `megarl sft RECIPE`. The result is a Hugging Face folder."""

    seed: Seed = 0
    output: Text
    """Folder of the run; the model is written to `output`/model."""
    model: Model
    data: Data
    """Lines with `demonstrations`: one of them is drawn each time the prompt is used."""
    training: SftTraining
