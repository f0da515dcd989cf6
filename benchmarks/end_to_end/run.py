"""One step of the quick start: this trainer beside TRL with vLLM, in turn, on the same model, data and settings.

    bash benchmarks/end_to_end/setup.sh
    make quickstart                                          # or any warmed-up model and data
    .venv/bin/python benchmarks/end_to_end/run.py [--rounds 3] [--steps 12] [--set KEY=VALUE ...]

Prints the median seconds of a step by phase over all rounds, without the first two steps of each run, and the ratio of the steps. Only the
ratios of one such run mean something: the machine's speed changes from hour to hour.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARM = ROOT / "runs/quickstart-warmup"
PHASES = ("generate", "verify", "logprobs", "train", "sync", "other", "step")
SKIPPED = 2  # steps in which caches fill and pages are touched for the first time


def ours(model: Path, data: Path, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    folder = Path(tempfile.mkdtemp(prefix="megarl-benchmark-"))
    settings = {"output": folder / "run", "model.path": model, "data.train": data, "data.evaluation": "{}", "training.steps": steps}
    settings |= {"evaluation.every": 0}
    command = [ROOT / ".venv/bin/megarl", "train", ROOT / "yaml/quickstart.yaml"]
    command += [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    command += [text for override in overrides for text in ("--set", override)]
    try:
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [{phase: row.get(f"time/{phase}", 0.0) for phase in PHASES} for row in rows]


def theirs(model: Path, data: Path, steps: int) -> list[dict[str, float]]:
    command = [ROOT / ".venv-trl/bin/python", ROOT / "benchmarks/end_to_end/trl_steps.py", model, data, steps]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--model", type=Path, default=WARM / "sft/model")
    arguments.add_argument("--data", type=Path, default=WARM / "data/train.jsonl")
    arguments.add_argument("--set", action="append", default=[])
    args = arguments.parse_args()
    steps: dict[str, list[dict[str, float]]] = {"megarl": [], "TRL + vLLM": []}
    for number in range(args.rounds):
        steps["megarl"] += ours(args.model, args.data, args.steps, args.set)[SKIPPED:]
        steps["TRL + vLLM"] += theirs(args.model, args.data, args.steps)[SKIPPED:]
        medians = {who: statistics.median(row["step"] for row in rows) for who, rows in steps.items()}
        print(f"after round {number + 1}: " + ", ".join(f"{who} {median:.2f} s" for who, median in medians.items()), flush=True)
    print(f"\n| median seconds | {' | '.join(steps)} |\n|---|" + "---|" * len(steps))
    for phase in PHASES:
        print(
            f"| {phase} | " + " | ".join(f"{statistics.median(row.get(phase, 0.0) for row in rows):.3f}" for rows in steps.values()) + " |"
        )
    print(f"\nTRL's step takes {medians['TRL + vLLM'] / medians['megarl']:.2f} times as long.")


if __name__ == "__main__":
    main()
