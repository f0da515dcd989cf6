"""report.html of a run: one file without script or outside reference, made from the run folder alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from megarl.errors import InputError
from megarl.observe.charts import Series, line_chart, share_bar, stacked_chart
from megarl.observe.metrics import read_metrics
from megarl.observe.names import clock, headline_metrics, pass_metrics, percent, points, series, short
from megarl.observe.report_samples import samples_section, show_text, verdict_colour
from megarl.observe.report_style import STYLE
from megarl.observe.run_folder import RunFolder, write_atomically

Rows = list[dict[str, Any]]

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, TEAL, GREY = "#1f6fb8", "#e08a00", "#1d8a4e", "#a9579b", "#64b5e0", "#cc4b24", "#2f9c95", "#b3bcc7"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, SKY, "#7a6a4f")
PHASES = {"generate": BLUE, "verify": TEAL, "logprobs": SKY, "train": ORANGE, "sync": PURPLE, "evaluate": GREEN, "other": GREY}
VERDICTS = ("ok", "wrong", "unparseable", "timeout", "crash", "skipped")

# title, what it says, metrics with their labels, options of line_chart
CURVES: dict[str, list[tuple[str, str, list[tuple[str, str]], dict[str, bool]]]] = {
    "Learning": [
        ("Reward", "Mean over the responses of a step; the band is one standard deviation.", [("reward/mean", "reward")], {}),
        ("Response length", "Mean tokens per response.", [("response/length_mean", "tokens")], {"zero": True}),
        (
            "Entropy",
            "Of the policy, in nats per token. Near zero nothing new is tried any more.",
            [("policy/entropy", "entropy")],
            {"zero": True},
        ),
        ("Loss", "The objective's own loss; seldom a measure of progress in reinforcement learning.", [("policy/loss", "loss")], {}),
    ],
    "Stability": [
        (
            "Engine against trainer",
            "Do both give the same log-probs? KL per token (nats) and the largest difference of one token, on a log scale.",
            [("policy/kl_rollout_train", "KL"), ("policy/logprob_diff_max", "largest difference")],
            {"log": True},
        ),
        ("Gradient norm", "Spikes mean unstable updates.", [("policy/grad_norm", "gradient norm")], {"zero": True}),
        (
            "Clip fraction",
            "Share of the tokens whose probability ratio the objective clips.",
            [("policy/clip_fraction", "clipped")],
            {"share": True, "zero": True},
        ),
        ("Learning rate", "As the schedule set it.", [("policy/learning_rate", "learning rate")], {"zero": True, "smooth": False}),
    ],
}
THROUGHPUT = [("throughput/generated_tokens_per_second", "generated"), ("throughput/trained_tokens_per_second", "trained")]


def render(folder: str | os.PathLike[str]) -> Path:
    """Write report.html into the run folder and give its path. InputError when the folder is missing, empty of a run, or cannot be written.

    Works at any time of a run: what is not recorded yet is said to be so.
    """
    run = RunFolder(folder)
    if not run.path.is_dir():
        raise InputError(f"{folder}: there is no such run folder.")
    if not run.recipe.exists() and not run.metrics.exists():
        raise InputError(f"{folder}: not a run folder, neither {run.recipe.name} nor {run.metrics.name} is in it.")
    rows = _by_step(read_metrics(run.metrics)) if run.metrics.exists() else []
    recipe_text = run.recipe.read_text(encoding="utf-8", errors="replace") if run.recipe.exists() else ""
    environment = _load_environment(run.environment)
    name = run.path.resolve().name
    body = [
        _header(name, rows),
        _notes(rows, environment),
        _tiles(rows),
        _setup_cards(recipe_text, environment),
        _evaluation(rows),
        *(_curve_section(title, curves, rows) for title, curves in CURVES.items()),
        _speed(rows),
        _verdicts(rows),
        samples_section(run.rollouts),
        _other_metrics(rows),
        _recipe_details(recipe_text),
    ]
    page = _PAGE.format(title=show_text(f"{name}: {_outcome(rows)[0]}"), style=STYLE, body="\n".join(part for part in body if part))
    try:
        write_atomically(run.report, page)
    except OSError as error:
        raise InputError(f"{run.report}: cannot be written ({error.strerror}).") from None
    return run.report


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _by_step(rows: Rows) -> Rows:
    """One row per step, in order; later lines of a step add to or replace earlier ones."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _load_environment(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{path}: not valid JSON: mend or remove the file.") from None
    return loaded if isinstance(loaded, dict) else {}


def _outcome(rows: Rows) -> tuple[str, str]:
    """The headline as text and whether it is "good", "bad" or ""."""
    if not rows:
        return "No metrics yet", ""
    steps = f"{rows[-1]['step']} step{'s' if rows[-1]['step'] != 1 else ''}"
    for label, name in headline_metrics(key for row in rows for key in row):
        values = series(rows, name)
        if len(values) > 1:
            first, last = values[0][1], values[-1][1]
            return (
                f"{label} {percent(first)} → {percent(last)} ({points(first, last)}) in {steps}",
                "good" if last > first else "bad" if last < first else "",
            )
        if values:
            return f"{label} {percent(values[0][1])} at step {values[0][0]}", ""
    rewards = series(rows, "reward/mean")
    if len(rewards) > 1:
        first, last = rewards[0][1], rewards[-1][1]
        return (
            f"Reward {first:.3f} → {last:.3f} ({last - first:+.3f}) in {steps}",
            "good" if last > first else "bad" if last < first else "",
        )
    return (f"Reward {rewards[0][1]:.3f} at step {rewards[0][0]}", "") if rewards else (f"{steps}, no reward recorded", "")


def _header(name: str, rows: Rows) -> str:
    text, kind = _outcome(rows)
    if kind and "(" in text:
        before, _, rest = show_text(text).partition("(")
        change, _, after = rest.partition(")")
        text = f'{before}<span class="{kind}">({change})</span>{after}'
    else:
        text = show_text(text)
    return f'<header><p class="run">{show_text(name)}</p><h1>{text}</h1></header>'


def _notes(rows: Rows, environment: dict[str, Any]) -> str:
    """What a reader should know before believing the curves."""
    notes = []
    bad: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isfinite(value):
                bad.setdefault(name, []).append(row["step"])
    for name, steps in sorted(bad.items()):
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        notes.append(f"{name} was not finite at step {', '.join(map(str, steps[:5]))}{more}: gaps in its curve.")
    if isinstance(environment.get("git"), dict) and environment["git"].get("dirty"):
        notes.append("The checkout differed from its commit when the run was started.")
    earlier = environment.get("earlier_starts")
    if isinstance(earlier, list) and earlier:
        notes.append(f"The run was resumed {'once' if len(earlier) == 1 else f'{len(earlier)} times'}; environment.json has each start.")
    return "".join(f'<p class="note">{show_text(note)}</p>' for note in notes)


def _tiles(rows: Rows) -> str:
    """A few numbers, first and last of the run."""
    tiles = []
    for label, name in (
        ("training reward", "reward/mean"),
        ("tokens per response", "response/length_mean"),
        ("entropy, nats per token", "policy/entropy"),
    ):
        values = series(rows, name)
        if values:
            change = f"{short(values[0][1])} → " if len(values) > 1 else ""
            tiles.append((f"{change}{short(values[-1][1])}", label))
    spent = [value for _, value in series(rows, "time/step")]
    if spent:
        tiles.append((clock(sum(spent)), f"in {len(spent)} steps" if len(spent) > 1 else "in one step"))
        tiles.append((f"{short(_median(spent))} s", "median step"))
    generated = [value for _, value in series(rows, THROUGHPUT[0][0])]
    if generated:
        tiles.append((short(_median(generated)), "generated tokens/s, median"))
    shown = "".join(f"<div class=tile><b>{show_text(value)}</b><span>{show_text(label)}</span></div>" for value, label in tiles)
    return f'<div class="tiles">{shown}</div>' if tiles else ""


def _setup_cards(recipe_text: str, environment: dict[str, Any]) -> str:
    cards = [("Recipe", _recipe_summary(recipe_text)), ("Environment", _environment_summary(environment))]
    shown = "".join(f'<section class="card"><h3>{title}</h3>{_definitions(pairs)}</section>' for title, pairs in cards)
    return f'<div class="two">{shown}</div>'


def _recipe_summary(text: str) -> list[tuple[str, Any]]:
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError:
        recipe = None

    def get(*keys: str) -> Any:
        found = recipe
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    objective = get("objective") if isinstance(get("objective"), dict) else {}
    parameters = ", ".join(f"{key} {value}" for key, value in objective.items() if key != "name" and value is not None)
    layout = get("training", "layout") if isinstance(get("training", "layout"), dict) else {}
    return [
        ("model", get("model", "path")),
        ("objective", f"{objective['name']}{f' ({parameters})' if parameters else ''}" if "name" in objective else None),
        ("training data", get("data", "train")),
        ("verifier", get("verifier", "name")),
        ("steps", get("training", "steps")),
        ("per step", _per_step(get("rollout", "prompts_per_step"), get("rollout", "responses_per_prompt"), get("training", "minibatches"))),
        ("longest response", f"{get('rollout', 'max_response_length')} tokens" if get("rollout", "max_response_length") else None),
        ("temperature", get("rollout", "temperature")),
        ("learning rate", get("training", "optimizer", "learning_rate")),
        ("precision", get("training", "precision")),
        (
            "layout",
            " × ".join(f"{key} {value}" for key, value in layout.items() if isinstance(value, int) and value > 1) or None,
        ),
        ("seed", get("seed")),
    ]


def _per_step(prompts: Any, responses: Any, minibatches: Any) -> str | None:
    if prompts is None or responses is None:
        return None
    updates = f", {minibatches} update{'s' if minibatches != 1 else ''}" if minibatches else ""
    return f"{prompts} prompts × {responses} responses{updates}"


def _environment_summary(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    versions = {"python": environment.get("python")} | (environment["versions"] if isinstance(environment.get("versions"), dict) else {})
    git = environment.get("git") if isinstance(environment.get("git"), dict) else {}
    commit = f"{str(git.get('commit'))[:12]}{' (modified)' if git.get('dirty') else ''}" if git.get("commit") else None
    cpus, memory = environment.get("cpus"), environment.get("memory_gib")
    return [
        ("started", environment.get("started")),
        ("command", environment.get("command")),
        ("commit", commit),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or None),
        ("machine", f"{cpus} CPUs, {memory} GiB" if cpus and memory else None),
        ("platform", environment.get("platform")),
    ]


def _definitions(pairs: Sequence[tuple[str, Any]]) -> str:
    shown = [f"<dt>{show_text(name)}</dt><dd>{show_text(str(value), limit=400)}</dd>" for name, value in pairs if value is not None]
    return f"<dl>{''.join(shown)}</dl>" if shown else '<p class="empty">not recorded</p>'


def _evaluation(rows: Rows) -> str:
    found = pass_metrics(key for row in rows for key in row)
    if not found:
        return ""
    curves = [(name, f"{dataset} pass@{k}".strip()) for dataset, k, name in found]
    chart = _card(
        "pass@k", "Share of the held-out prompts that at least one of k samples solves.", curves, {"share": True, "zero": True}, rows
    )
    lines = []
    for name, label in curves:
        values = series(rows, name)
        if not values:
            continue
        (_, first), (_, last) = values[0], values[-1]
        step, best = max(values, key=lambda pair: pair[1])
        kind = "good" if last > first else "bad" if last < first else ""
        change = f'<span class="{kind}">{points(first, last).removesuffix(" points")}</span>' if len(values) > 1 else ""
        cells = [percent(first), percent(last), change, f"{percent(best)} <span class=sub>at {step}</span>"]
        lines.append(f"<tr><td>{show_text(label)}</td>{''.join(f'<td class=number>{cell}</td>' for cell in cells)}</tr>")
    return f"<h2>Evaluation</h2><div class=two>{chart}{_table(('', 'first', 'last', 'points', 'best'), lines)}</div>"


def _curve_section(title: str, curves: list, rows: Rows) -> str:
    cards = [_card(*curve, rows) for curve in curves if any(name in row for row in rows for name, _ in curve[2])]
    if not cards and title == "Learning":
        return '<h2>Learning</h2><p class="empty">No step is recorded yet: the curves come with the first one.</p>'
    return f'<h2>{title}</h2><div class="two">{"".join(cards)}</div>' if cards else ""


def _card(title: str, text: str, metrics: list[tuple[str, str]], options: dict[str, bool], rows: Rows) -> str:
    """A titled chart with its last values."""
    drawn = []
    for index, (name, label) in enumerate(pair for pair in metrics if any(pair[0] in row for row in rows)):
        drawn.append(Series(label, PALETTE[index % len(PALETTE)], _points(rows, name), _band(rows) if name == "reward/mean" else None))
    hidden = sum(1 for one in drawn for _, value in one.points if options.get("log") and value is not None and value <= 0)
    if hidden:
        text += f" {hidden} value{'s' if hidden > 1 else ''} at or below zero cannot be shown."
    legend = _legend([(one.label, one.colour) for one in drawn]) if len(drawn) > 1 else ""
    last = _last_value(drawn[0], options.get("share", False)) if len(drawn) == 1 else ""
    return (
        f'<section class="card"><div class="head"><h3>{show_text(title)}</h3>{last}</div><p class="sub">{show_text(text)}</p>'
        f"{legend}{line_chart(drawn, _step_range(rows), **options)}</section>"
    )


def _last_value(one: Series, share: bool) -> str:
    finite = [value for _, value in one.points if value is not None]
    return f"<b>{percent(finite[-1]) if share else short(finite[-1])} <i>last</i></b>" if finite else ""


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li><i class=key style=background:{colour}></i>{show_text(label)}</li>" for label, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def _points(rows: Rows, name: str) -> list[tuple[float, float | None]]:
    """A missing metric is no point, one that is not finite is a gap."""
    return [(row["step"], float(row[name]) if math.isfinite(row[name]) else None) for row in rows if name in row]


def _band(rows: Rows) -> list[float | None]:
    deviations = [row.get("reward/std", math.nan) for row in rows if "reward/mean" in row]
    return [float(value) if math.isfinite(value) else None for value in deviations]


def _step_range(rows: Rows) -> tuple[float, float]:
    return rows[0]["step"], rows[-1]["step"]


def _names_under(rows: Rows, prefix: str, order: Sequence[str]) -> list[str]:
    """Metrics `<prefix>x` as x: those in `order` first, then the others by name."""
    present = {name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)}
    return [name for name in order if name in present] + sorted(present - set(order))


def _speed(rows: Rows) -> str:
    phases = [name for name in _names_under(rows, "time/", list(PHASES)[:-1]) if name not in ("step", "other")]
    if any("time/other" in row for row in rows):
        phases.append("other")
    cards = []
    if phases:
        spare = iter(PALETTE[::-1] * 4)
        layers = [Series(name, PHASES.get(name) or next(spare), _points(rows, f"time/{name}")) for name in phases]
        totals = [sum(value for _, value in layer.points if value) for layer in layers]
        whole = sum(totals) or 1.0
        legend = _legend([(f"{layer.label} {percent(total / whole)}", layer.colour) for layer, total in zip(layers, totals)])
        bar = share_bar([(layer.label, layer.colour, total / whole) for layer, total in zip(layers, totals)])
        cards.append(
            '<section class="card"><h3>Time per step</h3><p class="sub">Seconds by phase; the bar on top is the whole run.</p>'
            f"{bar}{legend}{stacked_chart(layers, _step_range(rows))}</section>"
        )
    if any(name in row for row in rows for name, _ in THROUGHPUT):
        cards.append(_card("Throughput", "Tokens per second.", THROUGHPUT, {"zero": True}, rows))
    return f'<h2>Speed</h2><div class="two">{"".join(cards)}</div>' if cards else ""


def _verdicts(rows: Rows) -> str:
    names = _names_under(rows, "verdict/", VERDICTS)
    if not names:
        return ""
    layers = [Series(name, verdict_colour(name), _points(rows, f"verdict/{name}")) for name in names]
    lines = []
    for layer in layers:
        known = [value for _, value in layer.points if value is not None]
        if known:
            cells = [percent(known[0]), percent(known[-1]), percent(max(known))]
            label = f"<td><i class=key style=background:{layer.colour}></i>{show_text(layer.label)}</td>"
            lines.append(f"<tr>{label}{''.join(f'<td class=number>{cell}</td>' for cell in cells)}</tr>")
    chart = stacked_chart(layers, _step_range(rows), share=True)
    text = "The verifier's verdict on each response. Timeouts and crashes are faults of the verifier or of the task, not wrong answers."
    return (
        f'<h2>Verdicts</h2><div class="two"><section class="card"><h3>Shares</h3><p class="sub">{text}</p>{chart}</section>'
        f"{_table(('', 'first', 'last', 'most'), lines)}</div>"
    )


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    titles = "".join(f"<th{' class=number' if index else ''}>{title}</th>" for index, title in enumerate(head))
    return f'<section class="card"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></section>'


def _other_metrics(rows: Rows) -> str:
    shown = (
        {name for curves in CURVES.values() for curve in curves for name, _ in curve[2]}
        | {"step", "reward/std"}
        | {name for name, _ in THROUGHPUT}
    )
    shown |= {name for _, _, name in pass_metrics(key for row in rows for key in row)}
    names = sorted({key for row in rows for key in row} - shown)
    names = [name for name in names if not name.startswith(("time/", "verdict/"))]
    if not names:
        return ""
    cards = "".join(_card(name, "", [(name, name)], {}, rows) for name in names)
    return f'<details><summary>All other metrics ({len(names)})</summary><div class="two" style="margin-top:12px">{cards}</div></details>'


def _recipe_details(text: str) -> str:
    return f'<details><summary>Full recipe</summary><pre class="text">{show_text(text, limit=200_000)}</pre></details>' if text else ""


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
