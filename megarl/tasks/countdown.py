"""Countdown: reach a target from given integers, each used exactly once, with + - * / and parentheses.

An example has the target as `answer` (an integer) and the integers as `metadata.numbers`.
The arithmetic is exact and the expression is read by a parser of our own: nothing that a model writes is ever run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import AnswerFormat, check_format, extract_answer
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
MAX_DIGITS = 18
SYMBOLS = "+-*/()"
SAME_SYMBOL = str.maketrans("×÷−", "*/-")
TOKEN = re.compile(r"[ \t\r\n]*(?:([0-9]+)|(.))", re.DOTALL)


class ExpressionError(Exception):
    """The text is not an expression; the message says why."""


def evaluate_expression(text: str, symbols: str = SYMBOLS) -> tuple[Fraction | None, list[int]]:
    """(exact value, or None where it divides by zero; the integers in the order of the text).

    Accepted: integers without sign and without leading zeros, the operators among `symbols` (also written × ÷ −), parentheses if
    `symbols` has them, white space. There is no unary minus: in Countdown every operator joins two numbers. Neither `=` nor words are
    part of an expression. Text over MAX_CHARACTERS, nesting over MAX_DEPTH and integers over MAX_DIGITS are refused.

    Raises ExpressionError.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    tokens = _tokens(text, symbols)
    values: list[Fraction | None] = []
    operators: list[str] = []
    numbers: list[int] = []
    depth = 0
    after_operand = False
    for token in tokens:
        if isinstance(token, int) or token == "(":
            if after_operand:
                raise ExpressionError(f"operator expected before {token}")
            if token == "(":
                depth += 1
                if depth > MAX_DEPTH:
                    raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
                operators.append(token)
            else:
                numbers.append(token)
                values.append(Fraction(token))
                after_operand = True
        elif not after_operand:
            raise ExpressionError(f"number expected before {token}")
        elif token == ")":
            _reduce(values, operators, 0)
            if not operators:
                raise ExpressionError("a closing parenthesis too many")
            operators.pop()
            depth -= 1
        else:
            _reduce(values, operators, PRECEDENCE[token])
            operators.append(token)
            after_operand = False
    if not after_operand:
        raise ExpressionError("ends where a number is expected")
    _reduce(values, operators, 0)
    if operators:
        raise ExpressionError("a parenthesis is not closed")
    return values[0], numbers


PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def _tokens(text: str, symbols: str) -> list[int | str]:
    tokens: list[int | str] = []
    for digits, other in TOKEN.findall(text.translate(SAME_SYMBOL).strip(" \t\r\n")):
        if other:
            if other not in symbols:
                raise ExpressionError(f"{other!r} is not part of an expression")
            tokens.append(other)
        elif len(digits) > MAX_DIGITS:
            raise ExpressionError(f"an integer of more than {MAX_DIGITS} digits")
        elif digits[0] == "0" and len(digits) > 1:
            raise ExpressionError(f"{digits} has a leading zero")
        else:
            tokens.append(int(digits))
    return tokens


def _reduce(values: list[Fraction | None], operators: list[str], precedence: int) -> None:
    """Apply the operators on top of the stack, back to a parenthesis, that bind at least as tightly as `precedence`."""
    while operators and operators[-1] != "(" and PRECEDENCE[operators[-1]] >= precedence:
        operator, right, left = operators.pop(), values.pop(), values.pop()
        values.append(_apply(operator, left, right))


def _apply(operator: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None or (operator == "/" and right == 0):
        return None
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


def make_countdown(
    format: AnswerFormat = "tagged", format_reward: float = 0.1, symbols: str = SYMBOLS, components: bool = False
) -> Verifier:
    """The verifier `countdown`.

    format: `tagged` (the last <answer>...</answer>) or `plain` (the whole response).
    format_reward: reward of an expression that uses the right numbers but misses the target (a division by zero misses it).
    symbols: the operators and parentheses that may be used.
    components: also give the reward vector (is an expression, uses each number once, reaches the target), each 0 or 1.

    Verdicts: `ok` with reward 1; `wrong` with `format_reward`, or with 0 if it does not use exactly the given numbers; `unparseable`
    with 0 if there is no answer or it is not an expression.
    """
    check_format(format, ("tagged", "plain"))
    is_number = isinstance(format_reward, (int, float)) and not isinstance(format_reward, bool)
    if not is_number or not math.isfinite(format_reward) or not 0 <= format_reward < 1:
        raise InputError(f"verifier.args: `format_reward` must be a number from 0 to below 1, got {format_reward!r}.")
    if not isinstance(symbols, str) or not set(symbols) & set(PRECEDENCE) or not set(symbols) <= set(SYMBOLS):
        raise InputError(f"verifier.args: `symbols` must be some of {SYMBOLS} with at least one operator, got {symbols!r}.")

    if not isinstance(components, bool):
        raise InputError(f"verifier.args: components must be true or false, got {components!r}.")

    def verify(response: str, example: Example) -> Verdict:
        verdict, met = grade(response, example)
        return replace(verdict, vector=(tuple(float(part < met) for part in range(3)),)) if components else verdict

    def grade(response: str, example: Example) -> tuple[Verdict, int]:
        """The verdict, and how many of the three components are met: each needs the one before it."""
        target, given = read_task(example)
        text = extract_answer(response, format)
        if text is None:
            return Verdict("unparseable", 0.0, detail="no answer"), 0
        try:
            value, numbers = evaluate_expression(text, symbols)
        except ExpressionError as error:
            return Verdict("unparseable", 0.0, detail=str(error)), 0
        if sorted(numbers) != sorted(given):
            return Verdict("wrong", 0.0, text, f"uses {sorted(numbers)}, expected each of {sorted(given)} once"), 1
        if value == target:
            return Verdict("ok", 1.0, text), 3
        detail = "divides by zero" if value is None else f"is {value}, expected {target}"
        return Verdict("wrong", float(format_reward), text, detail), 2

    return verify


def read_task(example: Example) -> tuple[int, list[int]]:
    """(target, numbers) of an example; InputError naming its id if it has none."""
    numbers = example.metadata.get("numbers")
    if not isinstance(numbers, list) or not numbers or not all(_is_int(number) and number >= 0 for number in numbers):
        raise InputError(f'example "{example.id}": countdown needs `metadata.numbers`, a list of integers >= 0, got {numbers!r}.')
    if not _is_int(example.answer):
        raise InputError(f'example "{example.id}": countdown needs the target, an integer, as `answer`, got {example.answer!r}.')
    return example.answer, numbers


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `countdown` cannot judge."""
    for example in examples:
        read_task(example)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
