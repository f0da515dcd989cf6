"""Questions that take several hops, in MuSiQue's format (Trivedi et al. 2022, arXiv 2108.00573).

An example has the final answer as `answer`, `metadata.question_decomposition`: one {"answer": ...} per hop in order, and may have
`metadata.answer_aliases`: other forms of the final answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import AnswerFormat, check_format, extract_answer
from megarl.tasks.several import judge_each
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

HOPS = 4
"""MuSiQue has two to four."""
F1_WEIGHT = 3.0

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def make_multi_hop(format: AnswerFormat = "tagged", answers: int | None = None) -> Verifier:
    """The verifier `multi_hop`.

    format: where the final answer is, `tagged` (the last <answer>...</answer>) or `plain` (the whole response).
    answers: so many numbered answers in a response (see `judge_each`), each as `format` says.

    Reward vector: for each of four hops 1 if its answer is somewhere in the response (1 as well for a hop that the question has not), then
    the F1 of the final answer over its words, the best over the aliases. Reward: (hops + 3 F1) / 7, 0 without an answer.
    Verdicts: `ok` if the final answer is the reference or an alias up to case, punctuation and articles; `unparseable` without an answer.
    """
    check_format(format, ("tagged", "plain"))

    def verify(response: str, example: Example) -> Verdict:
        references, hops = read_task(example)
        answer = extract_answer(response, format)
        if answer is None:
            return Verdict("unparseable", 0.0, detail="no answer", vector=((0.0,) * (HOPS + 1),))
        said = f" {normalize(response)} "
        hits = [float(f" {normalize(hop)} " in said) for hop in hops] + [1.0] * (HOPS - len(hops))
        f1 = max(word_f1(answer, reference) for reference in references)
        exact = any(normalize(answer) == normalize(reference) for reference in references)
        reward = (sum(hits) + F1_WEIGHT * f1) / (HOPS + F1_WEIGHT)
        return Verdict("ok" if exact else "wrong", reward, answer, vector=((*hits, f1),))

    return judge_each(verify, answers)


def normalize(text: str) -> str:
    """Lower case without punctuation, articles and surplus white space, as SQuAD compares answers (arXiv 1606.05250)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def word_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words of the normalised texts, as multisets; 1 if both have none."""
    mine, wanted = normalize(answer).split(), normalize(reference).split()
    if not mine or not wanted:
        return float(mine == wanted)
    return 2 * (Counter(mine) & Counter(wanted)).total() / (len(mine) + len(wanted))


def read_task(example: Example) -> tuple[list[str], list[str]]:
    """([reference, aliases...], answers of the hops); InputError naming the example if they are not there."""
    place = f'example "{example.id}": multi_hop needs'
    aliases = example.metadata.get("answer_aliases") or []
    hops = example.metadata.get("question_decomposition")
    if not isinstance(example.answer, str) or not example.answer.strip():
        raise InputError(f"{place} the final answer, text, as `answer`, got {example.answer!r}.")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InputError(f"{place} `metadata.answer_aliases`, if given, to be a list of texts, got {aliases!r}.")
    readable = isinstance(hops, list) and all(isinstance(hop, dict) and isinstance(hop.get("answer"), str) for hop in hops)
    if not readable or not 1 <= len(hops) <= HOPS:
        raise InputError(f"{place} `metadata.question_decomposition`, a list of 1 to {HOPS} objects with an `answer`, got {hops!r}.")
    return [example.answer, *aliases], [hop["answer"] for hop in hops]


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `multi_hop` cannot judge."""
    for example in examples:
        read_task(example)
