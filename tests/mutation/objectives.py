"""Plant one fault at a time in a copy of the objectives and see whether their tests notice.

    python tests/mutation/objectives.py [--only TEXT] [--jobs N]

Each fault is a text substitution with a name. Prints a table and exits 1 if a fault survives, or if its text is no longer in the source.
Takes minutes; not part of the default test run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401  imported once, before the forks
import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megarl" / "objectives"
COPIED = (
    "megarl/__init__.py",
    "megarl/errors.py",
    "megarl/objectives",
    "tests/unit/objectives",
    "tests/data/conformance",
    "benchmarks/objectives",
    "docs/methods.md",
)
ORDER = ("conformance", "golden", "parts", "parameters", "extremes", "updates", "diagnostics", "lpo_extensions", "plain", "listwise")
"""Test files, the quickest to notice first."""


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str


class Run(NamedTuple):
    fault: Fault | None
    folder: Path
    process: int
    begun: float


FAULTS = [
    Fault("population std turned unbiased", "rewards.py", 'if kind == "unbiased" else 1.0', 'if kind != "unbiased" else 1.0'),
    Fault(
        "equal groups not zeroed",
        "rewards.py",
        "torch.where(self.equal_group, 0.0, self.reward",
        "torch.where(self.equal_group & False, 0.0, self.reward",
    ),
    Fault("single response not equal", "rewards.py", " | (self.group_size == 1)", ""),
    Fault(
        "spread tolerance reversed",
        "rewards.py",
        'spread[self.group] < self.parameters["equal_tol"]',
        'spread[self.group] <= -self.parameters["equal_tol"]',
    ),
    Fault("overlong penalty added", "rewards.py", "reward = reward - overlong_penalty", "reward = reward + overlong_penalty"),
    Fault("overlong penalty without a floor", "rewards.py", "inside, 1.0)", "inside, inside)"),
    Fault("filter reads the reward", "rewards.py", "degenerate(batch, correct)", "degenerate(batch, reward > 0)"),
    Fault("all-wrong groups stay", "rewards.py", "(right == 0) | (right == size)", "(right == size)"),
    Fault("KL reward on masked tokens", "rewards.py", 'torch.where(mask, kl["coef"] * estimate, 0.0)', 'kl["coef"] * estimate'),
    Fault("KL reward with the wrong sign", "rewards.py", "reward = reward - segment_sum(penalty", "reward = reward + segment_sum(penalty"),
    Fault("std_eps forgotten", "advantages.py", 'scored.group_std(kind) + scored.parameters["std_eps"]', "scored.group_std(kind)"),
    Fault(
        "leave-one-out factor inverted",
        "advantages.py",
        "scored.centred * size / (size - 1).clamp(min=1)",
        "scored.centred * (size - 1).clamp(min=1) / size",
    ),
    Fault("MaxRL divides at a mean of 0", "advantages.py", 'mean > scored.parameters["equal_tol"]', "mean > -1e9"),
    Fault("batch std per dropped too", "advantages.py", "inside = numbers[scored.in_batch]", "inside = numbers"),
    Fault("NSR keeps the correct", "advantages.py", "keep=~scored.correct", "keep=scored.correct"),
    Fault("WAPO keeps the mean", "advantages.py", 'scored.centred > scored.parameters["equal_tol"]', "scored.centred >= -1e-12"),
    Fault("reward on the first token", "advantages.py", "rewards.index_add_(0, last[present]", "rewards.index_add_(0, 0 * last[present]"),
    Fault(
        "bootstrap for all responses",
        "advantages.py",
        "torch.where(batch.truncated, batch.bootstrap_value",
        "torch.where(batch.truncated | True, batch.bootstrap_value",
    ),
    Fault("critic's lambda ignored", "advantages.py", 'policy if parameters["lambda_critic"] is None else', "policy if True else"),
    Fault(
        "targets from whitened advantages",
        "advantages.py",
        "result[1, positions] = returns + values",
        "result[1, positions] = advantages + values",
    ),
    Fault("lambda from all tokens", "gae.py", "1 / (alpha * length.clamp(min=1))", "1 / (alpha * (length + 1))"),
    Fault("GAE crosses responses", "gae.py", "torch.where(same, power[:-reach] * result[reach:], 0.0)", "power[:-reach] * result[reach:]"),
    Fault("GAE stops one doubling early", "gae.py", "while reach < longest", "while reach * 2 < longest"),
    Fault("next value of the next response", "gae.py", "torch.where(same, values[1:], result[:-1])", "values[1:]"),
    Fault("whitening eps outside the root", "gae.py", "(centred.square().mean() + 1e-8).sqrt()", "(centred.square().mean().sqrt() + 1e-2)"),
    Fault(
        "clip takes the minimum",
        "ratios.py",
        "value = torch.maximum(value, bound)\n    if dual",
        "value = torch.minimum(value, bound)\n    if dual",
    ),
    Fault(
        "slope passes the clip",
        "ratios.py",
        "torch.where(clipped, 0.0, -ratio_slope * advantage), ratio, clipped)\n\n\ndef weighted",
        "-ratio_slope * advantage, ratio, clipped)\n\n\ndef weighted",
    ),
    Fault(
        "clip_low and clip_high swapped",
        "ratios.py",
        "None if low is None else 1 - low, None if high is None else 1 + high",
        "None if high is None else 1 - high, None if low is None else 1 + low",
    ),
    Fault(
        "dual clip on the other sign",
        "ratios.py",
        "torch.where(advantage < 0, -dual * advantage, torch.inf)",
        "torch.where(advantage > 0, -dual * advantage, torch.inf)",
    ),
    Fault("gradient through a clamped ratio", "ratios.py", "ratio, torch.where(clamped == log_ratio, ratio, 0.0)", "ratio, ratio"),
    Fault("sequence ratio clamped at 20", "ratios.py", "(-20.0, 10.0)", "(-20.0, 20.0)"),
    Fault("LPO clips in ratio space", "ratios.py", "math.log1p(-low)", "-low"),
    Fault(
        "LPO pessimistic is hard",
        "ratios.py",
        "clipped = bound > value\n    return TokenLoss(torch.maximum(value, bound)",
        "clipped = clamped != delta\n    return TokenLoss(torch.maximum(value, bound)",
    ),
    Fault("value clip takes the smaller error", "ratios.py", "bounded_error.abs() > error.abs()", "bounded_error.abs() < error.abs()"),
    Fault("value loss without the half", "ratios.py", "bounded_error, error).square() / 2", "bounded_error, error).square()"),
    Fault("k3 with the ratio inverted", "kl.py", "torch.expm1(-x) + x, -torch.expm1(-x)", "torch.expm1(x) - x, torch.expm1(x)"),
    Fault("k3 gradient not cut", "kl.py", "torch.where(value > K3_LIMIT, 0.0, slope)", "slope"),
    Fault("weights after normalising by all", "correction.py", "weights[term_mask].mean()", "weights.mean()"),
    Fault("MIS truncates", "correction.py", "weights = torch.where(inside, ratio, 0.0)", "weights = ratio.clamp(low, high)"),
    Fault("products over masked tokens", "correction.py", "log_ratio = torch.where(mask, log_ratio, 0.0)", "log_ratio = log_ratio + 0.0"),
    Fault("empty responses in the denominator", "aggregate.py", "present.sum().clamp(min=1)", "float(len(count))"),
    Fault(
        "token mean per response", "aggregate.py", "present / count.sum().clamp(min=1)", "present / (count * present.sum()).clamp(min=1)"
    ),
    Fault(
        "groups counted by responses",
        "aggregate.py",
        "inside.double(), group, groups) > 0).double().sum()",
        "inside.double(), group, groups)[group] > 0).double().sum()",
    ),
    Fault("forward KL reversed", "listwise.py", "return policy - log_target.exp()", "return log_target.exp() - policy"),
    Fault("coefficients not centred", "listwise.py", "policy * (h - segment_sum(policy * h, group, groups)[group])", "policy * h"),
    Fault(
        "target without s_t",
        "listwise.py",
        'segment_log_softmax(targets["logit"] + targets.get("start", score), group, groups)\n    if pointwise',
        'segment_log_softmax(targets["logit"], group, groups)\n    if pointwise',
    ),
    Fault("reverse KL clamped", "listwise.py", "h = -log_ratio\n", "h = -log_ratio.clamp(-20, 20)\n"),
    Fault("Hellinger without the half", "listwise.py", "(1 - ratio.sqrt()) / 2", "(1 - ratio.sqrt())"),
    Fault(
        "score summed, not averaged",
        "surrogates.py",
        "sums / prepared.length.clamp(min=1), prepared.per_response",
        "sums, prepared.per_response",
    ),
    Fault(
        "TPO drops the normaliser",
        "surrogates.py",
        "log_normaliser / tokens[group].clamp(min=1) + tokenless",
        "0 * log_normaliser + tokenless",
    ),
    Fault(
        "WAPO against old_logp",
        "surrogates.py",
        "ratios.token_ratio(tokens.logp, tokens.rollout_logp)",
        "ratios.token_ratio(tokens.logp, tokens.old_logp)",
    ),
    Fault(
        "dropped responses keep a gradient",
        "surrogates.py",
        '"coefficient": torch.where(prepared.kept, coefficient, 0.0), "target"',
        '"coefficient": coefficient, "target"',
    ),
    Fault(
        "top entropy not rounded up", "objective.py", "int(-((-(fraction * len(positions) - 1e-9)) // 1))", "int(fraction * len(positions))"
    ),
    Fault("top entropy takes the lowest", "objective.py", "descending=True, stable=True", "descending=False, stable=True"),
    Fault("KL over the selected tokens", "objective.py", "term_count=_count(term_mask, batch)", "term_count=_count(surrogate_mask, batch)"),
    Fault("NLL on every response", "objective.py", "nll_mask = term_mask & scored.correct[batch.sequence]", "nll_mask = term_mask"),
    Fault("truncated responses stay", "objective.py", "kept = kept & ~batch.truncated", "kept = kept & True"),
    Fault("weight on no token", "objective.py", "weight = weight * prepared.weights.index_select(0, token_index)", "weight = weight * 1"),
    Fault(
        "denominator of the whole batch",
        "objective.py",
        "terms, nll = prepared.term_count * inside",
        "terms, nll = prepared.term_count * 1",
    ),
    Fault(
        "inactive although KL reaches",
        "objective.py",
        "if self._kl_loss or self.uses_entropy or self.uses_value_model:",
        "if self.uses_entropy or self.uses_value_model:",
    ),
    Fault("silent groups declared active only", "objective.py", "reached = reached & ~silent", "reached = reached & silent"),
    Fault("incomplete scalars accepted", "objective.py", "bad = relevant & ~complete & ~absent", "bad = relevant & complete & absent"),
    Fault(
        "split groups accepted", "objective.py", "prepared.num_groups)[prepared.group] > inside", "prepared.num_groups)[prepared.group] < 0"
    ),
    Fault("NaN log-probs accepted", "batch.py", "value.detach().isfinite() | ~self.mask", "value.detach().isfinite() | True"),
    Fault("softmax without the maximum", "batch.py", "centred = scores - segment_max(scores, index, size)[index]", "centred = scores"),
    Fault(
        "weights by order of groups",
        "vector.py",
        "weight_seed(batch.seed, batch.step, batch.group_ids[group])",
        "weight_seed(batch.seed, batch.step, str(group))",
    ),
    Fault(
        "padding with zero rows",
        "vector.py",
        "best = scores.new_full((batch.num_responses, scores.shape[1]), -torch.inf)",
        "best = scores.new_zeros((batch.num_responses, scores.shape[1]))",
    ),
    Fault("mean of the rows, not the best", "vector.py", 'expand_as(scores), scores, "amax")', 'expand_as(scores), scores, "amin")'),
    Fault(
        "booleans pass as numbers",
        "parameters.py",
        "if isinstance(value, bool) or not isinstance(value, (int, float))",
        "if not isinstance(value, (int, float))",
    ),
    Fault("low above high accepted", "parameters.py", 'result["low"] > result["high"]', 'result["low"] > 1e9 + result["high"]'),
    Fault("lpo takes alpha 1", "presets.py", "number(0, 1, above=True, below=True)", "number(0, 1, above=True)"),
    Fault("gspo with a token ratio", "presets.py", '"ratio": "sequence", "clip_low": 3e-4', '"ratio": "token", "clip_low": 3e-4'),
    Fault(
        "dapo keeps degenerate groups",
        "presets.py",
        '{**GROUP, "clip_high": 0.28, "drop_degenerate_groups": True}',
        '{**GROUP, "clip_high": 0.28}',
    ),
    Fault("peaks and valleys exchanged", "taxonomy.py", "return sampled >= collision", "return sampled < collision"),
    Fault("token kinds: no collision in the entropy", "taxonomy.py", "- squares - collision * entropy)", "- squares)"),
    Fault("token kinds: no collision in the probability", "taxonomy.py", "(1 - 2 * sampled + collision)", "(1 - 2 * sampled)"),
    Fault(
        "token kinds: tokens without an advantage counted",
        "taxonomy.py",
        "torch.where(counted, bin_index",
        "torch.where(counted | True, bin_index",
    ),
    Fault("entropy change of the wrong sign", "taxonomy.py", "return -advantage * (f.gather", "return advantage * (f.gather"),
    Fault("switch one step early", "schedule.py", 'step > switch["after_step"]', 'step >= switch["after_step"]'),
    Fault(
        "replay of what is too old", "replay.py", "version - group.version <= self.max_age", "version - group.version <= self.max_age + 1"
    ),
    Fault("drift with a sign", "replay.py", "segment_max(score.abs()", "segment_max(score"),
    Fault("lists across prefixes", "segments.py", "prefix = (*prefix, text)", "prefix = (*prefix, len(text) > 0)"),
]


def copy_tree(target: Path) -> None:
    for relative in COPIED:
        source, destination = ROOT / relative, target / relative
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination)


def start(fault: Fault | None) -> Run | str:
    """Copy, plant the fault (None: none) and fork a process that runs the tests; or say why the fault cannot be planted."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    copy_tree(folder)
    if fault is not None:
        file = folder / "megarl" / "objectives" / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            shutil.rmtree(folder)
            return f"its text occurs {text.count(fault.old)} times"
        file.write_text(text.replace(fault.old, fault.new))
    process = os.fork()
    if process == 0:
        run_tests(folder)
    return Run(fault, folder, process, time.monotonic())


def run_tests(folder: Path) -> None:
    """In the forked process: run the tests of the copy and leave. The heavy imports are there already; the package is the copy's."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with open("output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    files = [f"tests/unit/objectives/test_objective_{name}.py" for name in ORDER]
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE", "--timeout=600", *files])
    sys.stdout.flush()
    os._exit(int(status))


def finish(run: Run, status: int) -> tuple[str, str]:
    """(`noticed`, `SURVIVED` or, if no test was reached, `BROKEN`; the first test that failed or what happened)."""
    output = (run.folder / "output").read_text()
    shutil.rmtree(run.folder)
    first = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    if first:
        return "noticed", first.split(" - ")[0].rpartition("::")[2] or first
    code = os.waitstatus_to_exitcode(status)
    return ("SURVIVED", "") if code == 0 else ("BROKEN", f"exit code {code}: {' '.join(output.split())[-200:]}")


def try_all(faults: list[Fault], jobs: int) -> int:
    """Print a line per fault; returns how many were not noticed."""
    waiting, running, bad = list(faults), {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            begun = start(fault)
            if isinstance(begun, str):
                bad += 1
                print(f"STALE            {fault.file:14} {fault.name:38} {begun}", flush=True)
            else:
                running[begun.process] = begun
        if running:
            process, status = os.wait()
            run = running.pop(process)
            verdict, test = finish(run, status)
            bad += verdict != "noticed"
            print(f"{verdict:8} {time.monotonic() - run.begun:5.0f} s  {run.fault.file:14} {run.fault.name:38} {test}", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    torch.set_num_threads(1)
    sound = start(None)
    verdict, test = finish(sound, os.waitpid(sound.process, 0)[1])
    if verdict != "SURVIVED":
        print(f"the tests fail without any fault: {test}")
        return 1
    bad = try_all(faults, options.jobs)
    print(f"{len(faults) - bad} of {len(faults)} faults noticed")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
