"""Promises of the report: it stands alone, it takes any state of a run and any text, and it says what came out."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from megarl.errors import InputError
from megarl.observe.metrics import MetricsWriter
from megarl.observe.report import render
from megarl.observe.report_samples import LONGEST, choose, show_text
from megarl.observe.run_folder import RunFolder

VOID = {"meta", "br", "rect", "line", "circle", "polyline", "polygon", "path"}


class Page(HTMLParser):
    """Tags with attributes, text by tag, and whether all tags are closed in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID or tag == "rect" or tag == "path":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def text(self) -> str:
        return " ".join(part for tag, parts in self.texts.items() if tag != "style" for part in parts)


def page_of(folder) -> Page:
    return Page(render(folder.path).read_text(encoding="utf-8"))


def headline(page: Page) -> str:
    text = "".join(page.texts["title"][0])
    return text.split(": ", 1)[1]


def assert_stands_alone(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
        "image",
        "use",
        "foreignobject",
    }
    for tag, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "srcset", "data", "action", "background"} & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert "url(" not in attributes.get("style", "")
    style = "".join(page.texts["style"])
    assert "url(" not in style and "@import" not in style and "//" not in style
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in page.tags)


def test_a_whole_run(finished):
    assert render(finished.path) == finished.report
    page = page_of(finished)
    assert_stands_alone(page)
    assert headline(page) == "pass@1 29.5% → 59.5% (+30.0 points) in 60 steps"
    charts = ("pass@k", "Reward", "Response length", "Entropy", "Engine against trainer", "Gradient norm", "Clip fraction", "Throughput")
    sections = ("Recipe", "Environment", "Time per step", "Verdicts", "Sampled rollouts", "Step 1 (early)", "Step 60 (late)", "Full recipe")
    for title in charts + sections:
        assert title in page.text, title
    assert "dapo (clip_high 0.28)" in page.text and "64 prompts × 8 responses, 2 updates" in page.text
    assert "generate 40.0%" in page.text and "train 50.0%" in page.text and "other 10.0%" in page.text
    assert "clip_high: 0.28" in "".join(page.texts["pre"])


def test_the_same_folder_gives_the_same_bytes(finished):
    first = render(finished.path).read_bytes()
    assert render(finished.path).read_bytes() == first


def test_no_metrics_yet(folder):
    page = page_of(folder)
    assert_stands_alone(page)
    assert headline(page) == "No metrics yet" and "No step is recorded yet" in page.text


def test_empty_metrics_and_nothing_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert headline(page_of(RunFolder(tmp_path))) == "No metrics yet"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"eval/pass@1": 0.295}, "pass@1 29.5% at step 1"),
        ({"reward/mean": 0.25}, "Reward 0.250 at step 1"),
        ({"policy/loss": 0.25}, "1 step, no reward recorded"),
        ({}, "1 step, no reward recorded"),
        ({"eval/pass@1": 0.345, "reward/mean": 0.1, "time/step": 1.0, "verdict/ok": 1.0}, "pass@1 34.5% at step 1"),
    ],
)
def test_one_step_only(folder, metrics, expected):
    with MetricsWriter(folder) as writer:
        writer.write(1, metrics)
    page = page_of(folder)
    assert_stands_alone(page)
    assert headline(page) == expected


def test_any_metric_may_be_missing(tmp_path, step_metrics):
    for index, missing in enumerate(step_metrics(10)):
        with RunFolder.create(tmp_path / str(index)) as folder, MetricsWriter(folder) as writer:
            for step in range(9, 12):
                writer.write(step, {name: value for name, value in step_metrics(step).items() if name != missing})
            assert_stands_alone(page_of(folder))


def test_values_that_are_not_finite_are_gaps_and_told(folder, step_metrics):
    with MetricsWriter(folder) as writer:
        for step in range(1, 21):
            writer.write(step, {name: float("nan") if step % 7 == 0 else value for name, value in step_metrics(step).items()})
        writer.write(21, dict.fromkeys(step_metrics(10), float("inf")))
    page = page_of(folder)
    assert_stands_alone(page)
    assert "policy/grad_norm was not finite at step 7, 14, 21: gaps in its curve." in page.text
    assert "inf" not in page.texts["b"] and "0.605 last" not in page.text
    assert "0.400 " in page.texts["b"], "the last reward that is a number"


def test_a_run_without_evaluation_is_judged_by_its_reward(folder):
    with MetricsWriter(folder) as writer:
        writer.write(1, {"reward/mean": 0.5})
        writer.write(2, {"reward/mean": 0.25})
    assert headline(page_of(folder)) == "Reward 0.500 → 0.250 (-0.250) in 2 steps"


def test_two_lines_of_a_step_are_one_step(folder):
    with MetricsWriter(folder) as writer:
        writer.write(1, {"reward/mean": 0.5})
        writer.write(1, {"eval/pass@1": 0.25})
    page = page_of(folder)
    assert headline(page) == "pass@1 25.0% at step 1" and "training reward" in page.text


HOSTILE = '</div></main><script>alert(1)</script><img src=x onerror="alert(2)">\' " & \x00\x1b[31m \u202e \ud800 <!--'


def test_hostile_text_stays_text(tmp_path, record):
    name = "run <script>alert(0)<"
    with RunFolder.create(tmp_path / name) as folder:
        folder.write_recipe(
            f"model: {{path: {HOSTILE.encode('ascii', 'ignore').decode()!a}}}\nobjective: {{name: '<script>', '<b>': '<i>'}}\n"
        )
        folder.write_environment(1, HOSTILE)
        with MetricsWriter(folder) as writer:
            writer.write(1, {"eval/<script>x</script>/pass@1": 0.5, "<img src=x>": 1.0, "verdict/<b>": 0.5, "time/<script>": 1.0})
        texts = {
            "prompt": [{"role": HOSTILE, "content": HOSTILE}],
            "response": HOSTILE,
            "answer": {HOSTILE: HOSTILE},
            "verdict": HOSTILE,
            "reward": HOSTILE,
        }
        folder.append_rollouts(1, [record(1, 0, prompt_id=HOSTILE, **texts)])
        page = page_of(folder)
    assert_stands_alone(page)
    assert "</div></main><script>alert(1)</script>" in page.text
    assert not set(page.text) & {"\x00", "\x1b", "\u202e"}


def test_a_recipe_that_is_no_yaml_is_shown_as_it_is(folder):
    folder.write_recipe("a: [1\n<b>: {")
    assert "<b>: {" in "".join(page_of(folder).texts["pre"])
    folder.write_recipe("- just\n- a list\n")
    page_of(folder)
    folder.write_recipe("model: 3\nobjective: dapo\ntraining: [1]\n")
    page_of(folder)


def test_huge_text_is_shortened_with_its_end_kept(folder, record):
    folder.append_rollouts(1, [record(1, index, response="x" * 5_000_000 + " the end", prompt="p" * 10**6) for index in range(2)])
    page = page_of(folder)
    assert folder.report.stat().st_size < 60_000
    assert "the end" in page.text and "characters left out" in page.text
    assert show_text("y" * LONGEST) == "y" * LONGEST


def test_samples_are_one_per_prompt_spread_evenly_and_not_picked_by_outcome(record):
    records = [record(1, index, verdict="ok" if index < 4 else "wrong") for index in range(48)]
    assert [chosen["prompt_id"] for chosen in choose(records)] == [f"test:{index}" for index in (0, 4, 8, 12, 16, 20)]
    assert len(choose(records[:6])) == 3 and choose([]) == []
    assert len(choose([record(1, index, prompt_id="same") for index in range(10)])) == 6


def test_rollout_records_may_lack_anything(folder):
    folder.append_rollouts(1, [{}, {"reward": [[1, 0]], "length": None, "answer": None}])
    folder.append_rollouts(2, [])
    page = page_of(folder)
    assert "[[1, 0]]" in page.text and "Step 2" not in page.text


def test_a_half_written_end_of_a_running_run_is_no_fault(finished):
    for path in (finished.metrics, finished.rollouts_of(60)):
        with open(path, "a") as file:
            file.write('{"step": 61, "rew')
    assert headline(page_of(finished)).endswith("in 60 steps")


def test_bad_input_gets_one_clear_message(tmp_path, folder):
    with pytest.raises(InputError, match="no such run folder"):
        render(tmp_path / "none")
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"not a run folder, neither recipe.yaml nor metrics.jsonl"):
        render(tmp_path / "other")
    folder.metrics.write_text('{"step": 1}\nbroken\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl:2"):
        render(folder.path)
    folder.metrics.unlink()
    folder.environment.write_text("{")
    with pytest.raises(InputError, match=r"environment.json"):
        render(folder.path)


def test_rendering_does_not_lock_the_run(finished):
    assert render(finished.path).exists()  # `finished` is locked by this process


def test_rendering_imports_no_torch(finished, python):
    code = f"""
import sys
from megarl.observe.report import render
render({str(finished.path)!r})
heavy = {{"torch", "numpy", "tensorboard", "ray", "vllm", "megatron", "transformers"}}
print(sorted(heavy & {{name.split(".")[0] for name in sys.modules}}))
"""
    assert python(code, capture_output=True, check=True).stdout == "[]\n"
