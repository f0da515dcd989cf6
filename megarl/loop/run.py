"""A run's roles and its folder: started together, resumed, checkpointed, shut down."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megarl.config.load import Loaded, load_recipe
from megarl.config.recipe import Recipe
from megarl.config.show import to_yaml
from megarl.errors import InputError
from megarl.loop.inputs import Inputs, engine_threads
from megarl.loop.machine import check_roles
from megarl.loop.replay import Replay
from megarl.loop.resuming import changes
from megarl.loop.rollouts import JudgedRollouts
from megarl.loop.stopping import StopRequest
from megarl.observe.ledger import Ledger
from megarl.observe.metrics import MetricsWriter, read_metrics
from megarl.observe.progress import Progress
from megarl.observe.run_folder import RunFolder, step_of
from megarl.platform.rollout_env import ray_cluster
from megarl.rollout.fleet import Fleet
from megarl.training.trainer import Trainer


class Run:
    """A training run in its folder, with its roles up. Use as a context manager."""

    def __init__(self, loaded: Loaded[Recipe], resume: bool):
        self.loaded, self.recipe, self.resume = loaded, loaded.recipe, resume
        self.step = 0
        """Last step that is done."""
        self.entropy: float | None = None
        """The policy's entropy in it, which a scheduled objective may look at."""

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            recipe = self.recipe
            self.progress = Progress(recipe.training.steps)
            if not self.resume:
                RunFolder(recipe.output).refuse_used()  # before the inputs are read, which takes seconds
            self._check_roles()
            self.inputs = Inputs(self.loaded)
            self.replay = None if recipe.replay is None else Replay(recipe.replay, recipe.seed)
            self.folder = stack.enter_context(RunFolder.open(recipe.output) if self.resume else RunFolder.create(recipe.output))
            checkpoint = self._prepare_folder()
            self.metrics = stack.enter_context(MetricsWriter(self.folder))
            self.ledger = Ledger()
            self.stop = stack.enter_context(StopRequest(self.progress.stage, "stopping after this step, with a checkpoint"))
            self._start_roles(stack, checkpoint)
            self.ledger.close_step()  # the start belongs to no step
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    # ------------------------------------------------------------------ folder

    def _prepare_folder(self) -> Path | None:
        """Write what explains the run; on resume, go back to the newest checkpoint and return it."""
        checkpoint = None
        if self.resume:
            self._check_resumable()
            for leftover in self.folder.checkpoints.glob(".step-*"):  # a save that did not end
                shutil.rmtree(leftover)
            checkpoint = max((p for p in self.folder.checkpoints.iterdir() if step_of(p) is not None), key=step_of, default=None)
            if checkpoint is not None:
                self._restore(checkpoint / "state.json")
            self.folder.truncate_metrics(self.step if checkpoint else -1)
            self.progress.recall(read_metrics(self.folder.metrics) if self.folder.metrics.exists() else [])
            where = f"step {self.step} ({checkpoint})" if checkpoint else "the start: there is no checkpoint yet"
            self.progress.stage(f"resuming {self.folder.path} from {where}")
        self.folder.write_recipe(to_yaml(self.recipe))
        self.folder.write_environment(self.recipe.seed, self.loaded.path)
        done = {"drop": "left out", "cut_left": "cut at their beginning"}.get(self.recipe.data.too_long)
        for path, count in self.inputs.too_long.items():
            if count:
                self.progress.stage(f"{path}: {count} prompts longer than data.max_prompt_length {done}")
        return checkpoint

    def _restore(self, path: Path) -> None:
        try:
            state = json.loads(path.read_text())
            self.step, self.entropy = int(state["step"]), state["entropy"]
            stream = dict(state["stream"])
            if self.step != step_of(path.parent) or not (self.entropy is None or math.isfinite(self.entropy)):
                raise ValueError(f"step {self.step}, entropy {self.entropy}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: the checkpoint is damaged ({error!r}); remove {path.parent} to resume without it.") from None
        if self.step > self.recipe.training.steps:
            raise InputError(f"{path}: step {self.step} is done already; training.steps = {self.recipe.training.steps} is below it.")
        self.inputs.stream.load_state_dict(stream)
        if self.replay is not None:
            self.replay.load(path.parent, self.inputs.stream.prompts)

    def _check_resumable(self) -> None:
        refused, allowed = changes(load_recipe(self.folder.recipe).recipe, self.recipe)
        if refused:
            what = ", ".join(refused)
            raise InputError(f"{self.folder.path}: a resumed run must keep what it was started with: {what}. Use another `output`.")
        if allowed:
            self.progress.stage(f"changed since the last start: {', '.join(allowed)}")

    def record(self, metrics: dict[str, float], rollouts: JudgedRollouts | None = None) -> None:
        """Write the metrics of the step that just ended, some of its rollouts, and its line on the terminal."""
        self.metrics.write(self.step, metrics)
        if rollouts is not None:
            self.folder.append_rollouts(self.step, rollouts.records(prompts=4, samples=4))
        self.progress.step(self.step, metrics)

    # ------------------------------------------------------------------ roles

    def _check_roles(self) -> None:
        rollout = self.recipe.rollout
        check_roles(engines=rollout.engines, tensor_parallel=rollout.tensor_parallel, ranks=self.recipe.training.layout.world_size)

    def _start_roles(self, stack: ExitStack, checkpoint: Path | None) -> None:
        recipe = self.recipe
        layout = recipe.training.layout
        self.progress.stage(f"starting {recipe.rollout.engines} engine(s) and {layout.world_size} training rank(s): {layout}")
        stack.enter_context(ray_cluster())
        # Ray has its own idea of SIGTERM; ours must be the last one installed.
        self.stop.listen()
        self._check_roles()
        self.fleet = Fleet.start(self.inputs.engine_config(), recipe.rollout.engines, threads=engine_threads(recipe), wait=False)
        stack.callback(self.fleet.shutdown)
        self.trainer = Trainer.start(self.inputs.rank_config, max_tokens=recipe.training.micro_batch_tokens, wait=False)
        stack.callback(self.trainer.shutdown)
        self.trainer.wait_ready()
        self.progress.stage("training ranks up")
        self.fleet.wait_ready()
        self.progress.stage("engines up")
        host, port = self.trainer.meeting_point()
        self.fleet.connect_weights(self.trainer.connect_sender, host=host, port=port)
        if checkpoint is not None:
            self.trainer.load(str(checkpoint / "megatron"))
            self.sync_weights(version=self.step)
        self.progress.stage("ready")

    def sync_weights(self, version: int) -> None:
        """Give the engines the trainer's weights; their version is the number of the step that made them."""
        self.fleet.sync_weights(self.trainer.send_weights, self.trainer.manifest, version=version)

    def checkpoint_due(self) -> bool:
        """Whether the step that has just been done is one to be saved after."""
        every = self.recipe.checkpoint.every
        return bool(every) and self.step % every == 0

    def save_checkpoint(self) -> Path:
        """Weights, optimizer and position in the data. The folder appears complete or not at all; older ones above `keep` go."""
        final = self.folder.checkpoint(self.step)
        temporary = final.with_name(f".{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "megatron").mkdir(parents=True)
        self.trainer.save(str((temporary / "megatron").resolve()))
        state = {"step": self.step, "entropy": self.entropy, "stream": self.inputs.stream.state_dict()}
        (temporary / "state.json").write_text(json.dumps(state, indent=2))
        if self.replay is not None:
            self.replay.save(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        saved = sorted((path for path in self.folder.checkpoints.iterdir() if step_of(path) is not None), key=step_of)
        for path in saved[: -self.recipe.checkpoint.keep]:
            shutil.rmtree(path)
        return final

    def remaining_steps(self) -> Iterator[int]:
        """The steps still to do, from 1; ends early when the run is told to stop."""
        while self.step < self.recipe.training.steps and self.stop.signal is None:
            yield self.step + 1
            # The loop's body sets `self.step` once the step is done.
