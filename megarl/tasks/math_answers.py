"""Mathematical answers: found in the response, then compared with the reference as text, as exact numbers, and at last by sympy.

An example has the reference as `answer`: a number, or text, where what follows the last `####` or stands in the last \\boxed{} counts if
there is one. Most answers never reach sympy, which is slow and can hang: that is why this verifier runs in the pool.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal, get_args

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import check_format, extract_answer
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

MathFormat = Literal["auto", "boxed", "tagged", "plain"]
MAX_CHARACTERS = 1000

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
MARKER = re.compile(r"answer\s*(?:is|are|:|=)+\s*:?\s*(?:\*\*)?", re.IGNORECASE)
DELIMITED = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?=\S)((?:\\\$|[^$\n])+?)(?<=\S)\$(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
SENTENCE_END = re.compile(r"\.(?:\s|$)|\n|;(?:\s|$)|,\s+(?:so|and|which|because|but|where)\b")
PROSE = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}|[A-Za-z]{2,} [A-Za-z]{2,}.*[0-9]")
PLAIN_NUMBER = re.compile(
    r"(?<![\w.])-?\s?\\?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?(?![0-9])|(?<![\w.])-?\.[0-9]+"
)


def make_math(format: MathFormat = "auto") -> Verifier:
    """The verifier `math`.

    format: where the answer is. `boxed`: in the last \\boxed{}. `tagged`: in the last <answer>...</answer>. `plain`: the whole response.
    `auto`: in the last \\boxed{}, else after the last ####, else after the last "answer is", else the last formula between dollar signs,
    else a response of one line as a whole, else the last number.

    Verdicts: `ok` with reward 1; `wrong` and `unparseable` with 0.
    """
    check_format(format, get_args(MathFormat))
    _load("verifier.name")

    def verify(response: str, example: Example) -> Verdict:
        reference = read_reference(example)
        answer = find_answer(response, format)
        if answer is None:
            return Verdict("unparseable", 0.0, detail="no answer")
        if len(answer) > MAX_CHARACTERS:
            return Verdict("unparseable", 0.0, answer[:MAX_CHARACTERS], f"an answer of more than {MAX_CHARACTERS} characters")
        right = equal_answers(answer, reference)
        return Verdict("ok", 1.0, answer) if right else Verdict("wrong", 0.0, answer, f"expected {reference}")

    return verify


def read_reference(example: Example) -> str:
    """The reference of an example; InputError naming its id if it has none."""
    answer = example.answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, str):
        found = _last_boxed(answer) or (answer.rpartition("####")[2] if "####" in answer else answer)
        if normalize(found):
            return found.strip()
    raise InputError(f'example "{example.id}": math needs the reference, a number or text, as `answer`, got {example.answer!r}.')


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `math` cannot judge."""
    for example in examples:
        read_reference(example)


# ------------------------------------------------------------------ finding
def find_answer(response: str, format: MathFormat = "auto") -> str | None:
    """The text of the answer, None if there is none; `make_math` says where it is looked for."""
    if format in ("tagged", "plain"):
        return extract_answer(response, format)
    boxed = _last_boxed(response)
    if boxed is not None or format == "boxed":
        return boxed
    if "####" in response:
        return _first_line(response.rpartition("####")[2])
    marked = [match.end() for match in MARKER.finditer(response)]
    if marked and (answer := _after_marker(response[marked[-1] :])):
        return answer
    if formulas := DELIMITED.findall(response):
        return next(part for part in formulas[-1] if part).strip() or None
    lines = response.strip().splitlines()
    if len(lines) == 1 and not PROSE.search(lines[0]):
        return lines[0].strip()
    numbers = PLAIN_NUMBER.findall(response)
    return numbers[-1].strip() if numbers else None


def _last_boxed(text: str) -> str | None:
    """What stands in the braces of the last \\boxed{}; None if there is none, or if its braces are never closed."""
    for match in reversed(list(BOX.finditer(text))):
        depth = 0
        for index in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0) if text[index - 1] != "\\" else 0
            if depth == 0:
                return text[match.end() + 1 : index].strip() or None
    return None


def _after_marker(text: str) -> str | None:
    formula = DELIMITED.match(text)
    if formula:
        return next(part for part in formula.groups() if part).strip()
    return SENTENCE_END.split(text, maxsplit=1)[0].strip(" *") or None


def _first_line(text: str) -> str | None:
    return (text.strip().splitlines() or [""])[0].strip() or None


# ---------------------------------------------------------------- comparing
WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
REMOVED = re.compile(
    r"\\(?:left|right|displaystyle|big[lr]?)(?![a-z])|(?<!\\)\\[,;:! ]|\\q?quad|~|\^\\circ|\^\{\\circ\}|°|\\degree|\\?\$|\*\*"
)
SAME = (
    (re.compile(r"[dt]frac"), "frac"),
    (re.compile("\N{MINUS SIGN}"), "-"),
    (re.compile("\N{MULTIPLICATION SIGN}"), r"\\times "),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<=[0-9])\s*(?:\\times|\\cdot|\*)\s*10\^\{?(-?[0-9]{1,3})\}?$"), r"e\1"),
)
UNIT = re.compile(
    r"(?<=[0-9}%])(?:\\text\{[^{}]*\}|\\mbox\{[^{}]*\}"
    r"|\s+(?!.*\b(?:or|and|of|to|more|less|than|not|plus|minus|times|over|by|[AaPp]\.?[Mm])\b)[A-Za-z]{2,}[A-Za-z ./-]*)(?:\^\{?[23]\}?)?$"
)
SPACED_NUMBER = re.compile(r"(?<=[0-9]) (?=[0-9])")
GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(?:(?:,|\{,\}| )[0-9]{3})+(?:\.[0-9]+)?(?:\s*\\?%)?")
NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:\\frac\{?(?P<a>[-+]?[0-9]+)\}?\{?(?P<b>[0-9]+)\}?"
    r"|(?P<n>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,3})?)(?:/(?P<d>[0-9]+))?)(?P<percent>\\?%|percent)?"
)
IN_BASE = re.compile(r"([0-9A-Z]+)_\{?([0-9]+)\}?")
WORDS = re.compile(r"[A-Za-z]{2,}(?:(?:[ ']|-(?=[A-Za-z]{2}))[A-Za-z]+)*")
ARTICLE = re.compile(r"(?:an?|the) (?=[a-z])", re.IGNORECASE)
MULTIPLE_CHOICE = re.compile(r"\(?([A-Z])\)?")
ASSIGNED = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?(?:\([a-z]\))?\s*=\s*(?=[^=])")


def equal_answers(answer: str, reference: str) -> bool:
    """Whether both say the same: as text without markup, as exact numbers without units, or for sympy."""
    mine, wanted = normalize(answer), normalize(reference)
    if "=" not in wanted:
        mine = ASSIGNED.sub("", mine, count=1)
    if _bare(mine) == _bare(wanted):
        return True
    numbers = _number(mine), _number(wanted)
    if numbers[0] and numbers[1]:
        return _equal_numbers(*numbers)
    if base := IN_BASE.fullmatch(wanted):  # for sympy a subscript is a part of a name
        return mine == base[1]
    # For sympy a word is a product of symbols, so that "no" would equal "on", and two numbers side by side are a product as well.
    if WORDS.fullmatch(wanted) or MULTIPLE_CHOICE.fullmatch(wanted) or IN_BASE.fullmatch(mine) or SPACED_NUMBER.search(mine):
        return False
    return _equal_for_sympy(mine, wanted)


def normalize(answer: str) -> str:
    """The answer without what only concerns its looks: delimiters, spacing commands, fonts, units after a number, a final full stop."""
    text = answer.strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        text = text.removeprefix(opening).removesuffix(closing)
    text = REMOVED.sub("", text.strip().rstrip(".")).strip()
    for pattern, replacement in SAME:
        text = pattern.sub(replacement, text)
    text = UNIT.sub("", text)
    while WRAPPERS.search(text):
        text = WRAPPERS.sub(r"\1", text)
    text = UNIT.sub("", " ".join(text.split()))
    return re.sub(r"[, {}]", "", text) if GROUPED_NUMBER.fullmatch(text) else text


def _bare(text: str) -> str:
    """For comparison as text: words in lower case without article, (A) as A, no spaces but those between digits."""
    if choice := MULTIPLE_CHOICE.fullmatch(text):
        return choice[1]
    if WORDS.fullmatch(text):
        return ARTICLE.sub("", text, count=1).casefold()
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


def _number(text: str) -> tuple[Fraction, bool] | None:
    """(value, whether it has a percent sign); None if the text is not a number, or divides by zero."""
    match = NUMBER.fullmatch(_bare(text))
    if match is None:
        return None
    numerator, denominator = (match["a"], match["b"]) if match["a"] else (match["n"], match["d"] or "1")
    if int(denominator) == 0:
        return None
    value = Fraction(numerator) / int(denominator)
    return (-value if match["sign"] == "-" else value), bool(match["percent"])


def _equal_numbers(mine: tuple[Fraction, bool], wanted: tuple[Fraction, bool]) -> bool:
    """A percent sign is a unit, so it may be missing; where only one has it, 50% is 1/2 too."""
    (a, percent), (b, wanted_percent) = mine, wanted
    return a == b or (percent != wanted_percent and a / (100 if percent else 1) == b / (100 if wanted_percent else 1))


def _equal_for_sympy(mine: str, wanted: str) -> bool:
    math_verify = _load("verifier.name")
    config = [math_verify.LatexExtractionConfig()]
    parsed = [math_verify.parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None) for text in (wanted, mine)]
    try:
        return all(parsed) and math_verify.verify(*parsed, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # sympy raises whatever two expressions that cannot be compared provoke: they are not equal
        return False


def _load(place: str):
    try:
        import math_verify
    except ImportError as error:
        raise InputError(f"{place}: math needs the package math-verify ({error}); install it with pip.") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; the pool has one
    return math_verify
