"""The sampled rollouts of a report, and the one way in which text from a run enters HTML."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from megarl.observe.metrics import read_jsonl
from megarl.observe.names import percent, short
from megarl.observe.run_folder import step_of

SAMPLES = 6  # of each of the two steps
LONGEST = 1600  # characters of one text in the table
_COLOURS = {"ok": "#1d8a4e", "wrong": "#8593a3", "unparseable": "#d98500", "timeout": "#a9579b", "crash": "#c23b22", "skipped": "#c9d0d8"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def verdict_colour(status: str) -> str:
    return _COLOURS.get(status, "#5b6bbf")


def show_text(text: str, limit: int = LONGEST) -> str:
    """HTML of any text: escaped, control characters made visible (those of direction too), the middle of a long one left out."""
    if len(text) <= limit:
        return _escaped(text)
    head = limit // 3  # the end has the answer
    left_out = f"<em>… {len(text) - limit:,} characters left out …</em>"
    return f"{_escaped(text[:head])} {left_out} {_escaped(text[head - limit :])}"


def samples_section(folder: Path) -> str:
    """Rollouts of the first and of the last recorded step. Nothing when there are none."""
    files = sorted((step, path) for path in folder.glob("step-*.jsonl") if (step := step_of(path)) is not None)
    files = [files[0], files[-1]] if len(files) > 1 else files
    steps = [(step, records) for step, path in files if (records := read_jsonl(path))]
    if not steps:
        return ""
    names = ("early", "late") if len(steps) > 1 else ("",)
    cards = "".join(_table(step, name, records) for (step, records), name in zip(steps, names))
    return f"<h2>Sampled rollouts</h2>{cards}"


def _table(step: int, name: str, records: list[dict[str, Any]]) -> str:
    chosen = choose(records)
    counts = Counter(str(record.get("verdict", "?")) for record in records)
    shares = ", ".join(f"{verdict} {percent(count / len(records))}" for verdict, count in counts.most_common(6))
    text = f"{len(chosen)} of {len(records):,} recorded responses, one per prompt and evenly spread. All of them: {shares}."
    head = "".join(f"<th>{title}</th>" for title in ("Prompt", "Response", "Expected answer", "Verdict", "Reward"))
    return (
        f'<section class="card"><h3>Step {step}{f" ({name})" if name else ""}</h3><p class="sub">{show_text(text, limit=400)}</p>'
        f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{"".join(map(_row, chosen))}</tbody></table></section>'
    )


def choose(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same few at every rendering, whatever the outcome: the first response of prompts at even distances."""
    first: dict[str, dict[str, Any]] = {}
    for record in records:
        first.setdefault(str(record.get("prompt_id")), record)
    candidates = list(first.values()) if len(first) > 1 else records
    count = min(SAMPLES, len(candidates))
    return [candidates[index * len(candidates) // count] for index in range(count)]


def _row(record: Mapping[str, Any]) -> str:
    verdict, reward, length = str(record.get("verdict", "?")), record.get("reward"), record.get("length")
    tokens = f'<br><span class="sub">{length:,} tokens</span>' if isinstance(length, int) else ""
    pill = f'<span class="pill" style="background:{verdict_colour(verdict)}">{show_text(verdict, limit=40)}</span>{tokens}'
    value = short(reward) if isinstance(reward, (int, float)) else show_text(_as_text(reward), limit=100)
    cells = (
        ("Prompt", _text(record.get("prompt"))),
        ("Response", _text(record.get("response"))),
        ("Expected answer", _text(record.get("answer"))),
        ("Verdict", pill),
        ("Reward", value),
    )
    return "<tr>" + "".join(f'<td data-name="{title}">{cell}</td>' for title, cell in cells) + "</tr>"


def _text(value: Any) -> str:
    return f'<div class="text" dir="auto">{show_text(_as_text(value))}</div>'


def _as_text(value: Any) -> str:
    """Chat messages as "role: content", other data as compact JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in value):
        return "\n".join(f"{part['role']}: {part['content']}" for part in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return escape(_CONTROL.sub("�", text))
