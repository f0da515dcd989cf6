"""Run conformance cases (docs/methods.md) through the code that training uses: `megarl conformance FILE...`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import InputError
from megarl.objectives.batch import TOKEN_FIELDS, TokenBatch
from megarl.objectives.objective import Objective, make_objective
from megarl.objectives.parameters import finite_number, unknown

CASE_FIELDS = ("id", "note", "objective", "tolerance", "batch", "expected", "error")
BATCH_FIELDS = ("step", "groups")
GROUP_FIELDS = ("id", "responses", "weights")
RESPONSE_FIELDS = ("reward", "correct", "truncated", *TOKEN_FIELDS, "bootstrap_value", "mask")
EXPECTED_FIELDS = ("advantages", "loss", "grad_logp", "value_loss", "grad_values")
RECIPE_ONLY = ("schedule", "sampler")
"""Parameters of recipes that the case format does not know."""
DEFAULT_TOLERANCE = 1e-6


@dataclass
class Result:
    id: str
    ok: bool
    largest_error: float = 0.0
    """Of |got - want| / (1 + |want|) over everything compared."""
    message: str = ""
    """For a failure: the field and what is wrong with it."""


def main(files: list[str], as_json: bool = False) -> int:
    """Run every case of `files`, print one line each. Returns 0, or 1 if a case failed. Raises InputError for a file without cases."""
    loaded = [(file, load_cases(file)) for file in files]
    results = [(file, run_case(case, f"#{index}")) for file, cases in loaded for index, case in enumerate(cases)]
    failed = [result for _, result in results if not result.ok]
    if as_json:
        rows = [
            {"file": file, "id": r.id, "ok": r.ok, "largest_error": r.largest_error if math.isfinite(r.largest_error) else None,
             "message": r.message}
            for file, r in results
        ]  # fmt: skip
        print(json.dumps({"passed": len(results) - len(failed), "failed": len(failed), "cases": rows}, indent=1))
        return 1 if failed else 0
    for _, result in results:
        print(
            f"{'ok  ' if result.ok else 'FAIL'} {result.id} {result.largest_error:.1e}" + (f" {result.message}" if result.message else "")
        )
    print(f"{len(results) - len(failed)} of {len(results)} cases passed")
    return 1 if failed else 0


def load_cases(file: str) -> list[Any]:
    """The list under `cases` of a JSON file."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}; expected a file with conformance cases") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not JSON: {error}; expected an object with a list `cases`") from error
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list) or not content["cases"]:
        raise InputError(
            f'{file}: has no cases; expected an object with a list `cases`, as {{"cases": [{{"objective": ..., "batch": ...}}]}}'
        )
    return content["cases"]


def run_case(case: Any, label: str = "#0") -> Result:
    """Compute one case and compare. A case that cannot be computed has failed, unless it says that it must be refused."""
    name = case["id"] if isinstance(case, dict) and isinstance(case.get("id"), str) else label
    wanted_error = case.get("error") if isinstance(case, dict) else None
    try:
        got = compute(case)
    except InputError as refusal:
        if isinstance(wanted_error, str) and wanted_error.lower() in str(refusal).lower():
            return Result(name, True)
        expectation = "" if wanted_error is None else f" (expected a refusal with {wanted_error!r})"
        return Result(name, False, math.inf, f"{refusal}{expectation}")
    except Exception as failure:  # a fault of this program, not of the case: reported with the case, the others still run
        return Result(name, False, math.inf, f"internal error: {type(failure).__name__}: {failure}")
    if wanted_error is not None:
        return Result(name, False, math.inf, f"was computed; expected a refusal with {wanted_error!r}")
    tolerance, largest, faults = case.get("tolerance", DEFAULT_TOLERANCE), 0.0, []
    for field, want in case.get("expected", {}).items():
        error = _difference(got.get(field), want)
        largest = max(largest, error)
        if not error <= tolerance:
            faults.append(f"`{field}`: " + ("another nesting or no number" if math.isinf(error) else f"off by {error:.3g}"))
    return Result(name, not faults, largest, "; ".join(faults))


def compute(case: Any) -> dict[str, Any]:
    """Advantages, loss and gradients of a case, nested as in the case. Raises InputError naming what must be refused."""
    objective, groups, step = read_case(case)
    batch = TokenBatch.from_lists(groups, dtype=torch.float64, step=step)
    if objective.composition.vector_rewards:
        for index, group in enumerate(groups):
            if "weights" not in group:
                raise InputError(f"{_place(groups, index)}: objective `{objective.name}` needs `weights`")
    if objective.uses_value_model and batch.values is None:
        raise InputError(f"objective `{objective.name}` needs `values`; {batch.absent.get('values', batch.place(0))} has none")
    prepared = objective.prepare(batch)
    update = objective.begin_update(prepared)
    tokens = torch.arange(batch.num_tokens)
    logp = batch.logp.clone().requires_grad_()
    values = batch.values.clone().requires_grad_() if objective.uses_value_model else None
    sums = objective.scalars(update, tokens, logp)
    scalars = None if sums is None else objective.finish_scalars(update, sums)
    out = objective.loss(update, tokens, logp, values=values, scalars=scalars)
    out.loss.backward()
    nest = _Nesting(groups)
    result = {
        "advantages": nest(objective.coefficients(update, scalars)),
        "loss": out.loss.item(),
        "grad_logp": nest(logp.grad),
    }
    if out.value_loss is not None:
        out.value_loss.backward()
        result |= {"value_loss": out.value_loss.item(), "grad_values": nest(values.grad)}
    return result


def read_case(case: Any) -> tuple[Objective, list[dict[str, Any]], int]:
    """The objective, the groups and the step of a case, every field checked."""
    _known(case, CASE_FIELDS, "case")
    _required(case, ("objective", "batch"), "case")
    if "expected" in case and "error" in case:
        raise InputError("the case has both `expected` and `error`; expected one of them")
    if "tolerance" in case and finite_number("tolerance", case["tolerance"]) < 0:
        raise InputError("`tolerance` is negative")
    if "expected" in case:
        _known(case["expected"], EXPECTED_FIELDS, "`expected`")
    for name in ("id", "note", "error"):
        if name in case and not isinstance(case[name], str):
            raise InputError(f"`{name}` is {case[name]!r}; expected a text")
    spec = case["objective"]
    for name in RECIPE_ONLY:
        if isinstance(spec, Mapping) and name in spec:
            raise InputError(f"unknown parameter `{name}`: it belongs to recipes, not to cases")
    objective = make_objective(spec)
    batch = case["batch"]
    _known(batch, BATCH_FIELDS, "`batch`")
    step = batch.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int):
        raise InputError(f"`step` is {step!r}; expected a whole number")
    groups = batch.get("groups")
    if not isinstance(groups, list) or not groups:
        raise InputError("`groups` of the batch is missing or empty; expected a list of groups")
    for index in range(len(groups)):
        _check_group(groups, index, objective.composition.vector_rewards)
    return objective, groups, step


def _check_group(groups: list[Any], index: int, vector: bool) -> None:
    group, place = groups[index], _place(groups, index)
    _known(group, GROUP_FIELDS, place)
    if "id" in group and not isinstance(group["id"], str):
        raise InputError(f"{place}: `id` is {group['id']!r}; expected a text")
    responses = group.get("responses")
    if not isinstance(responses, list) or not responses:
        raise InputError(f"{place}: `responses` is missing or empty; expected a list of responses")
    width = None
    for number, response in enumerate(responses):
        where = f"{place}, response {number}"
        _check_response(response, where)
        if vector:
            width = _row_width(response["reward"], width, where)
        else:
            _number(response["reward"], "reward", where)
    if "weights" in group:
        own_width = _row_width(group["weights"], None, place, "weights")
        if own_width is None:
            raise InputError(f"{place}: `weights` is empty; expected rows of weights")
        if vector and width is not None and own_width != width:
            raise InputError(f"{place}: `weights` have {own_width} numbers per row; the rows of `reward` have {width}")


def _check_response(response: Any, where: str) -> None:
    _known(response, RESPONSE_FIELDS, where)
    _required(response, ("reward", "logp"), where)
    for name in ("correct", "truncated"):
        if name in response and not isinstance(response[name], bool):
            raise InputError(f"{where}: `{name}` is {response[name]!r}; expected true or false")
    if "bootstrap_value" in response:
        _number(response["bootstrap_value"], "bootstrap_value", where)
    for name in (*TOKEN_FIELDS, "mask"):
        if name not in response:
            continue
        tokens = response[name]
        if not isinstance(tokens, list):
            raise InputError(f"{where}: `{name}` is {tokens!r}; expected a list of numbers")
        for value in tokens:
            _number(value, name, where)
        if len(tokens) != len(response["logp"]):
            raise InputError(f"{where}: `{name}` has {len(tokens)} entries; expected {len(response['logp'])}, as `logp`")
    if any(value not in (0, 1) for value in response.get("mask", ())):
        raise InputError(f"{where}: `mask` holds entries other than 0 and 1")


def _row_width(rows: Any, width: int | None, where: str, name: str = "reward") -> int | None:
    """Width of the rows of a matrix, which must be `width` if that is known; None for an empty list."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise InputError(f"{where}: `{name}` is {rows!r}; expected a list of rows of numbers")
    for row in rows:
        for value in row:
            _number(value, name, where)
        if not row or (width is not None and len(row) != width):
            raise InputError(
                f"{where}: `{name}` has a row of {len(row)} numbers; expected {width or 'at least one'}, as in the group's other rows"
            )
        width = len(row)
    return width


def _number(value: Any, name: str, where: str) -> None:
    try:
        finite_number(name, value)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _known(mapping: Any, fields: tuple[str, ...], where: str) -> None:
    if not isinstance(mapping, dict):
        raise InputError(f"{where} is {mapping!r}; expected an object with {', '.join(fields)}")
    for name in mapping:
        if name not in fields:
            raise unknown("field", name, fields, f" of {where}")


def _required(mapping: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in mapping:
            raise InputError(f"{where} lacks `{name}`")


def _place(groups: list[Any], index: int) -> str:
    name = groups[index].get("id") if isinstance(groups[index], dict) else None
    return f"group {name if isinstance(name, str) else index!r}"


class _Nesting:
    """Flat tokens back into lists by group and response."""

    def __init__(self, groups: list[dict[str, Any]]):
        self.lengths = [[len(response["logp"]) for response in group["responses"]] for group in groups]

    def __call__(self, tokens: Tensor) -> list[list[list[float]]]:
        numbers: Iterator[float] = iter(tokens.tolist())
        return [[[next(numbers) for _ in range(length)] for length in group] for group in self.lengths]


def _difference(got: Any, want: Any) -> float:
    """Largest |got - want| / (1 + |want|); infinite if the nesting differs or a number is missing or NaN."""
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return math.inf
        return max((_difference(a, b) for a, b in zip(got, want, strict=True)), default=0.0)
    if isinstance(want, bool) or not isinstance(want, (int, float)) or not isinstance(got, float):
        return math.inf
    error = abs(got - want) / (1 + abs(want))
    return math.inf if math.isnan(error) else error
