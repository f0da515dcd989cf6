"""What an objective costs in a training step of the quick start.

    make quickstart                                          # or any warmed-up model and data
    PYTHONPATH=. .venv/bin/python benchmarks/objectives/step_share.py [--rounds 4]

One run of yaml/quickstart.yaml that trains with each preset in turn, `--rounds` times; its first round is left out. Prints for each preset
the median milliseconds of a step spent in the objective (controller and rank, backward pass included), the median step, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from megarl.objectives import PRESETS

ROOT = Path(__file__).parents[2]
WARM = ROOT / "runs/quickstart-warmup"
LENGTH = 12
LIMIT = 0.02


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=4)
    args = arguments.parse_args()
    names = [name for name, composition in PRESETS.items() if not composition.value_model]
    specs = [{"name": name} | ({"norm_length": LENGTH} if name in ("dr_grpo", "wapo") else {}) for name in names]
    folder = Path(tempfile.mkdtemp(prefix="megarl-benchmark-"))
    settings = {
        "output": folder / "run",
        "model.path": WARM / "sft/model",
        "data.train": WARM / "data/train.jsonl",
        "data.evaluation": "{}",
        "evaluation.every": 0,
        "diagnostics.every": 0,
        "verifier.args.components": "true",
        "training.steps": len(specs) * args.rounds,
        "objective": json.dumps({"name": "benchmarks.objectives.timed:Timed", "objectives": specs, "log": str(folder)}),
    }
    command = [ROOT / ".venv/bin/python", "-m", "megarl", "train", ROOT / "yaml/quickstart.yaml"]
    command += [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    try:
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        steps = {row["step"]: row["time/step"] for row in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())}
        spent: dict[int, float] = defaultdict(float)
        for file in folder.glob("*.jsonl"):
            for call in map(json.loads, file.read_text().splitlines()):
                spent[call["step"]] += call["seconds"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("| objective | objective ms | step ms | share |\n|---|---|---|---|")
    shares = {}
    for index, name in enumerate(names):
        chosen = [step for step in steps if (step - 1) % len(names) == index and step > len(names)]
        objective, step = statistics.median(spent[s] for s in chosen), statistics.median(steps[s] for s in chosen)
        shares[name] = statistics.median(spent[s] / steps[s] for s in chosen)
        print(f"| {name} | {1e3 * objective:.1f} | {1e3 * step:.0f} | {shares[name]:.2%} |")
    largest = max(shares, key=shares.get)
    print(f"\nThe most: {largest} with {shares[largest]:.2%} of its step; the limit is {LIMIT:.0%}.")
    return int(shares[largest] >= LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
