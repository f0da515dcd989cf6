"""How often the verifier `math` is right about answers whose truth is known: reference answers in five surface forms, and perturbed ones.

    python benchmarks/verifiers/math_confusion.py [--data DIR] [--perturbed N]

DIR holds gsm8k_test.jsonl (`answer` ending in "#### N") and math500.jsonl (`answer` in LaTeX). Prints the confusion table and the answers
that were judged wrongly; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

from megarl.tasks.dataset import Example
from megarl.tasks.judging import Judge
from megarl.tasks.math_answers import read_reference

NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
UNITS = ("dollars", "eggs", "cm^2", "square inches", "hours per day")


def surface_forms(answer: str, index: int) -> dict[str, str]:
    """The same answer as different models would write it."""
    if NUMBER.fullmatch(answer):
        dressed = f"\\boxed{{{answer}\\text{{ {UNITS[index % len(UNITS)]}}}}}" if index % 2 else f"#### ${answer}"
    else:
        spaced = answer.replace("\\frac", "\\dfrac").replace("+", "\\, +\\, ").replace(", ", ",\\; ")
        dressed = f"\\[ \\boxed{{ \\displaystyle {spaced} }} \\]"
    return {
        "plain": answer,
        "boxed": f"We compute it step by step, and so \\boxed{{{answer}}}.",
        "units or spacing": f"Thus the total is\n{dressed}",
        "in a sentence": f"After 3 steps and 12 lines of algebra we see that the final answer is ${answer}$. This is what was asked for.",
        "second attempt": f"I get \\boxed{{77777}}. Wait, I forgot the last of the 5 cases. Again: the answer is \\boxed{{{answer}}}.",
    }


def perturb(answer: str, rng: random.Random) -> str:
    """An answer near the given one that is another answer: a digit, a sign or a letter is changed."""
    changes = []
    for match in re.finditer(r"(?<!\}\^)[0-9]", answer):
        other = rng.choice([digit for digit in "123456789" if digit != match[0]])
        changes.append(answer[: match.start()] + other + answer[match.end() :])
    for match in re.finditer(r"(?<=[\w}) ])[+-](?=[\w\\( ])", answer):
        changes.append(answer[: match.start()] + {"+": "-", "-": "+"}[match[0]] + answer[match.end() :])
    letters = [match.start() for match in re.finditer(r"(?<![\\A-Za-z])[A-Za-z]|(?<=text\{)[A-Za-z]", answer)]
    if not changes and letters:
        at = rng.choice(letters)
        changes.append(answer[:at] + ("Q" if answer[at] != "Q" else "R") + answer[at + 1 :])
    return rng.choice(changes or ["-" + answer])


def cases(data: Path, perturbed: int) -> list[tuple[str, str, str, bool, Example]]:
    """(source, form, response, whether it is right, example)."""
    found = []
    for source, name in (("GSM8K test", "gsm8k_test.jsonl"), ("MATH-500", "math500.jsonl")):
        lines = (data / name).read_text(encoding="utf-8").splitlines()
        examples = [Example(f"{name}:{number}", "", json.loads(line)["answer"]) for number, line in enumerate(lines, start=1)]
        for index, example in enumerate(examples):
            for form, response in surface_forms(read_reference(example), index).items():
                found.append((source, form, response, True, example))
        rng = random.Random(source)
        for index, example in enumerate(rng.sample(examples, perturbed // 2)):
            other = perturb(read_reference(example), rng)
            form, response = rng.choice(list(surface_forms(other, index).items()))
            found.append((source, "perturbed", response, False, example))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "data")
    parser.add_argument("--perturbed", type=int, default=300)
    args = parser.parse_args()
    all_cases = cases(args.data, args.perturbed)
    with Judge("math", {}) as judge:
        judge(["1"], [all_cases[0][-1]])
        began = time.monotonic()
        verdicts = judge([case[2] for case in all_cases], [case[4] for case in all_cases])
        elapsed = time.monotonic() - began
    table: Counter[tuple[str, str, str]] = Counter()
    mistakes = []
    for (source, form, response, right, example), verdict in zip(all_cases, verdicts, strict=True):
        table[source, form, verdict.status] += 1
        if (verdict.status == "ok") != right:
            mistakes.append(f"{example.id} {form}: {verdict.status} for {response!r}, reference {read_reference(example)!r}")
    statuses = sorted({status for _, _, status in table})
    print(f"{'source':12} {'form':18}" + "".join(f"{status:>12}" for status in statuses))
    for source, form in dict.fromkeys((source, form) for source, form, _ in table):
        print(f"{source:12} {form:18}" + "".join(f"{table[source, form, status]:12}" for status in statuses))
    print(f"{len(all_cases)} grades in {elapsed:.1f} s; {len(mistakes)} mistakes", *mistakes, sep="\n")
    return bool(mistakes)


if __name__ == "__main__":
    sys.exit(main())
