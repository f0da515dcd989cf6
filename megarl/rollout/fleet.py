"""The rollout engines of a run: prompts are routed to them, weights are synced to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from megarl import platform
from megarl.errors import RunFailed
from megarl.platform.rollout_env import engine_environment, engine_resources
from megarl.rollout.engine import EngineConfig, GroupRequest, RolloutEngine
from megarl.rollout.response import Response
from megarl.rollout.sampling import Sampling, request_seed
from megarl.sync.manifest import Manifest
from megarl.sync.transport import BUCKET_BYTES, free_port, receiver_init


class HasTokens(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a wait ends with an error."""

    start: float = 600.0
    generate: float = 1800.0
    """Without a single prompt done by any engine."""
    sync: float = 300.0
    call: float = 60.0
    """Short commands: pause, abort, health."""


class EngineFailure(RunFailed):
    """An engine died, failed or did not answer in time; `engine` is its index."""

    def __init__(self, engine: int, message: str) -> None:
        super().__init__(f"rollout engine {engine} {message}")
        self.engine = engine


class Fleet:
    """Engines by index; make one with `Fleet.start` inside a Ray cluster, and shut it down."""

    def __init__(self, actors: list[Any], config: EngineConfig, timeouts: Timeouts) -> None:
        self._actors = actors
        self._config = config
        self._timeouts = timeouts

    @classmethod
    def start(
        cls, config: EngineConfig, engines: int = 1, *, threads: int = 1, timeouts: Timeouts = Timeouts(), wait: bool = True
    ) -> Fleet:
        """Start `engines` engines. `threads`: CPU threads of each, on a CPU.

        With `wait=False` it returns at once, so that trainers can start meanwhile; `wait_ready` must follow.
        """
        actor_class = ray.remote(RolloutEngine).options(
            max_concurrency=1000,
            max_restarts=0,  # a restarted engine holds the first weights: bringing one back needs a sync too
            runtime_env={"env_vars": engine_environment(threads)},
            **engine_resources(config.tensor_parallel),
        )
        fleet = cls([actor_class.remote(config, platform.has_gpu()) for _ in range(engines)], config, timeouts)
        if wait:
            fleet.wait_ready()
        return fleet

    def __len__(self) -> int:
        return len(self._actors)

    def wait_ready(self) -> None:
        """Block until every engine has loaded its model."""
        self._all("health", timeout=self._timeouts.start, doing="while starting")

    def health(self) -> list[dict[str, Any]]:
        """Per engine: process id, version of its weights, requests in flight. EngineFailure if one does not answer."""
        return self._all("health", timeout=self._timeouts.call, doing="when asked for its health")

    def generate(self, prompts: Sequence[HasTokens], n: int, sampling: Sampling, *, step: int, seed: int) -> list[Response]:
        """`n` responses to each prompt, ordered by (prompt_index, sample_index).

        The same prompts, sampling, step, seed and weights give the same tokens and log-probs, if the engines do nothing else meanwhile and
        are as many. EngineFailure if an engine dies or gives a log-prob that is not a number.
        """
        groups: dict[int, list[Response]] = dict(self.stream(prompts, n, sampling, step=step, seed=seed))
        return [response for index in range(len(prompts)) for response in groups[index]]

    def stream(
        self, prompts: Sequence[HasTokens], n: int, sampling: Sampling, *, step: int, seed: int
    ) -> Iterator[tuple[int, list[Response]]]:
        """As `generate`, but yields (prompt_index, its n responses) as prompts are done. Generation starts at the call."""
        streams = {}
        for engine, actor in enumerate(self._actors):
            requests = [
                GroupRequest(index, tuple(prompts[index].token_ids), tuple(request_seed(seed, step, index, sample) for sample in range(n)))
                for index in range(engine, len(prompts), len(self._actors))
            ]
            if requests:
                streams[actor.generate.options(num_returns="streaming").remote(requests, sampling)] = engine
        return self._collect(streams)

    def _collect(self, streams: dict[Any, int]) -> Iterator[tuple[int, list[Response]]]:
        limit = self._timeouts.generate
        while streams:
            ready, waiting = ray.wait(list(streams), num_returns=1, timeout=limit)
            if not ready:
                raise EngineFailure(streams[waiting[0]], f"has finished no prompt for {limit:g} s")
            for stream in ready:
                try:
                    groups = ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except Exception as error:
                    raise self._failure(streams[stream], "during generation", error) from error
                for group in groups:
                    yield group[0].prompt_index, group

    def connect_weights(
        self,
        start_sender: Callable[[str, int, int], list[Any]],
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Make the group in which weights travel.

        `start_sender(host, port, world_size)` starts the trainer's `connect` and returns Ray references; `host` is the trainer's address.
        """
        port = port or free_port(host)
        workers = self._config.tensor_parallel
        world_size = 1 + workers * len(self._actors)
        transport = "nccl" if platform.has_gpu() else "gloo"
        references = {
            actor.connect_weights.remote(
                receiver_init(transport, host, port, 1 + workers * engine, world_size, bucket_bytes, self._timeouts.sync)
            ): engine
            for engine, actor in enumerate(self._actors)
        }
        self._wait(references, start_sender(host, port, world_size), self._timeouts.sync, "while connecting to the trainer")

    def sync_weights(
        self, start_send: Callable[[], list[Any]], manifest: Manifest, version: int, *, recompute_running: bool = False
    ) -> None:
        """Replace every engine's weights by the trainer's.

        `start_send()` starts the trainers' send of `manifest` and returns Ray references. Engines are ready to receive first, and empty
        their prefix caches after. Responses in flight go on with the new weights and say so in their versions.
        """
        names, dtypes, shapes = list(manifest.names), list(manifest.dtypes), [list(shape) for shape in manifest.shapes]
        references = {
            actor.receive_weights.remote(names, dtypes, shapes, version, recompute_running): engine
            for engine, actor in enumerate(self._actors)
        }
        self._wait(references, start_send(), self._timeouts.sync, f"during the sync of weights version {version}")

    def pause(self) -> None:
        self._all("pause", timeout=self._timeouts.call, doing="when told to pause")

    def resume(self) -> None:
        self._all("resume", timeout=self._timeouts.call, doing="when told to resume")

    def abort(self) -> None:
        """End all requests in flight; whoever streams them gets what there is, with finish reason `abort`."""
        self._all("abort", timeout=self._timeouts.call, doing="when told to abort")

    def shutdown(self) -> None:
        """End every engine process; safe to repeat and after failures."""
        actors, self._actors = self._actors, []
        if actors:
            ray.wait([actor.shutdown.remote() for actor in actors], num_returns=len(actors), timeout=10.0)
        for actor in actors:  # also those that did not answer
            ray.kill(actor)

    def _all(self, method: str, *, timeout: float, doing: str) -> list[Any]:
        references = {getattr(actor, method).remote(): engine for engine, actor in enumerate(self._actors)}
        return self._wait(references, [], timeout, doing)

    def _wait(self, engines: dict[Any, int], others: list[Any], timeout: float, doing: str) -> list[Any]:
        """Wait for all references; the first error ends it. An engine's error comes before the trainer's, which it may have caused."""
        deadline = time.monotonic() + timeout
        pending = [*engines, *others]
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(engines[reference] for reference in pending if reference in engines)
                if late:
                    raise EngineFailure(late[0], f"did not answer within {timeout:g} s {doing}")
                raise RunFailed(f"the trainer did not answer within {timeout:g} s {doing}")
            if ready[0] in engines:
                self._get(ready[0], engines[ready[0]], doing)
                continue
            try:
                ray.get(ready[0])
            except Exception as error:
                failed, _ = ray.wait([r for r in pending if r in engines], num_returns=len(engines), timeout=5.0) if pending else ([], [])
                for reference in failed:
                    self._get(reference, engines[reference], doing)
                raise RunFailed(f"the trainer failed {doing}: {error}") from error
        return [ray.get(reference) for reference in engines]

    def _get(self, reference: Any, engine: int, doing: str) -> Any:
        try:
            return ray.get(reference)
        except Exception as error:
            raise self._failure(engine, doing, error) from error

    @staticmethod
    def _failure(engine: int, doing: str, error: Exception) -> EngineFailure:
        if isinstance(error, ray.exceptions.RayActorError):
            return EngineFailure(engine, f"died {doing}")
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        return EngineFailure(engine, f"failed {doing}: {cause}")
