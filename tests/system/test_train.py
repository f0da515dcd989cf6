"""The loop on real Megatron, vLLM and Ray: it learns from what it should, explains itself, repeats itself, stops and goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from megarl.observe.metrics import read_metrics
from tests.system.conftest import QUICKSTART, ROOT, megarl_here, overrides

pytestmark = pytest.mark.system

# What must be the same whenever the same steps are done again: everything but clocks.
CLOCKS = ("time/", "throughput/")


def train(output, settings, *flags, check=0):
    return megarl_here("train", QUICKSTART, *overrides({"output": output, **settings}), *flags, check=check)


def rows(folder):
    """Metrics by step, without the clocks."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def run(tmp_path_factory, settings):
    folder = tmp_path_factory.mktemp("run") / "first"
    train(folder, settings | {"checkpoint.every": 1, "checkpoint.keep": 2})
    return folder


def test_the_folder_explains_itself(run):
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "report.html", "model/config.json", "model/model.safetensors"):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").glob("events.*"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    metrics = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5]
    promised = """reward/mean reward/std response/length_mean policy/entropy policy/kl_rollout_train policy/grad_norm policy/clip_fraction
        policy/loss time/generate time/train time/sync time/step throughput/generated_tokens_per_second verdict/ok"""
    assert set(promised.split()) <= metrics[1].keys()
    assert {"eval/pass@1", "eval/pass@8"} <= metrics[0].keys() & metrics[5].keys()
    for row in metrics:
        assert sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step") == pytest.approx(row["time/step"], abs=1e-9)
    record = json.loads((run / "rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "answer", "verdict", "reward"} <= record.keys()
    megarl_here("show", run / "recipe.yaml")


def test_engine_and_trainer_agree_at_every_step(run):
    differences = [row["policy/logprob_diff_max"] for row in read_metrics(run / "metrics.jsonl")[1:]]
    assert len(differences) == 5 and max(differences) < 1e-4


def test_without_the_sync_they_would_not(tmp_path, settings, monkeypatch):
    from megarl.loop.run import Run

    monkeypatch.setattr(Run, "sync_weights", lambda self, version: None)
    train(tmp_path / "run", settings | {"training.steps": 2, "evaluation.every": 0})
    before, after = (row["policy/logprob_diff_max"] for row in read_metrics(tmp_path / "run/metrics.jsonl"))
    assert before < 1e-4 < after


def test_the_model_is_a_hugging_face_folder(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    out = model.generate(**tokenizer("3 5 9=17:", return_tensors="pt"), max_new_tokens=10, do_sample=False)
    assert torch.isfinite(model(out).logits).all() and len(tokenizer.decode(out[0], skip_special_tokens=True)) > len("3 5 9=17:")


def test_the_same_seed_gives_the_same_run(run, tmp_path, settings):
    train(tmp_path / "second", settings)
    assert rows(tmp_path / "second") == rows(run)
    for step in range(1, 6):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (tmp_path / "second" / name).read_text() == (run / name).read_text()


def test_training_beside_generation_changes_nothing(run, tmp_path, settings):
    # With few sequences at a time the first mini-batch's prompts are done while others wait.
    train(tmp_path / "overlapped", settings | {"rollout.overlap_training": "true", "rollout.max_concurrent_sequences": 32})
    assert rows(tmp_path / "overlapped") == rows(run)


def test_another_seed_gives_another(run, tmp_path, settings):
    train(tmp_path / "other", settings | {"seed": 1, "training.steps": 1, "evaluation.every": 0})
    assert rows(tmp_path / "other")[0]["reward/mean"] != rows(run)[1]["reward/mean"]


def test_a_folder_in_use_is_not_overwritten(run, settings):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    said = train(run, settings, check=2).stderr
    assert said.count("\n") == 1 and "--resume" in said and "output" in said
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def start(output, settings, home, *flags):
    command = [sys.executable, "-m", "megarl", "train", QUICKSTART, *overrides({"output": output, **settings}), *flags]
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": home},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(process, folder, step, seconds=200):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {seconds} s")


def still_running(home):
    """Processes of the run: they all carry its temporary folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == home:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_nothing_runs(home, seconds=30):
    deadline = time.monotonic() + seconds
    while still_running(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not still_running(home)


@pytest.fixture
def home():
    """A short path: Ray's sockets lie in it, and the length of their paths is limited."""
    path = tempfile.mkdtemp(prefix="mg", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("number, group", [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGKILL, False)])
def test_a_stopped_run_leaves_no_process_and_goes_on_as_if_it_had_not_been(run, tmp_path, settings, home, number, group):
    folder = tmp_path / "stopped"
    process = start(folder, settings | {"checkpoint.every": 2}, home)
    wait_for_step(process, folder, 3 if number == signal.SIGKILL else 2)
    os.killpg(process.pid, number) if group else process.send_signal(number)  # as Ctrl-C and `timeout` do
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
    assert_nothing_runs(home)
    if number != signal.SIGKILL:
        assert "Traceback" not in output
    train(folder, settings | {"checkpoint.every": 2}, "--resume")
    assert rows(folder) == rows(run)


def read_until(process, text):
    """What the process says, up to the line with `text`."""
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(said)


@pytest.mark.parametrize("number, when", [(signal.SIGTERM, "ready"), (signal.SIGINT, "training ranks up")])
def test_a_second_signal_ends_it_at_once(tmp_path, settings, home, number, when):
    """Neither the step (of many prompts) nor the wait for the engines comes to its end."""
    folder = tmp_path / "cut"
    process = start(folder, settings | {"rollout.prompts_per_step": 2048, "evaluation.every": 0}, home)
    for text in (when, "once more: at once", "stopping at once"):
        read_until(process, text)
        if text != "stopping at once":
            process.send_signal(number)
    output, _ = process.communicate()
    assert (process.returncode, output) == (128 + number, "megarl: interrupted\n")
    assert not rows(folder) and not list((folder / "checkpoints").iterdir())
    assert_nothing_runs(home)


def test_of_two_runs_started_at_once_in_one_folder_one_goes_on(tmp_path, settings, home):
    folder = tmp_path / "shared"
    both = [start(folder, settings | {"training.steps": 1, "evaluation.every": 0}, home) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outputs
    refused = next(output for output, process in zip(outputs, both, strict=True) if process.returncode == 2)
    assert "Traceback" not in refused and "use another `output`" in refused
    assert len(rows(folder)) == 1


def test_a_run_killed_before_its_first_checkpoint_starts_over(run, tmp_path, settings, home):
    folder = tmp_path / "early"
    process = start(folder, settings, home)
    wait_for_step(process, folder, 0)
    process.kill()
    process.communicate()
    assert_nothing_runs(home)
    assert "no checkpoint yet" in train(folder, settings, "--resume").stdout
    assert rows(folder) == rows(run)


def test_resume_refuses_another_run(run, settings, tmp_path):
    said = train(run, settings | {"seed": 5}, "--resume", check=2).stderr
    assert "seed 0 -> 5" in said and "Traceback" not in said
    assert "no such run folder" in train(tmp_path / "none", settings, "--resume", check=2).stderr


def test_a_sharded_optimizer_is_saved_and_loads_under_another_layout(run, tmp_path, settings):
    folder = tmp_path / "sharded"
    chosen = settings | {"evaluation.every": 0, "training.optimizer.distributed": "true"}
    train(folder, chosen | {"training.steps": 2, "training.layout.data": 2})
    train(folder, chosen | {"training.steps": 3}, "--resume")
    got, want = rows(folder)[2], rows(run)[3]
    # The same to rounding. Adam without its moments makes a step several times as long, and the mini-batches after it differ.
    assert got["policy/loss"] == pytest.approx(want["policy/loss"], abs=1e-4)
    assert got["policy/grad_norm"] == pytest.approx(want["policy/grad_norm"], rel=1e-3)


def test_a_damaged_checkpoint_is_named(run, settings, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(run, folder)
    state = folder / "checkpoints/step-000005/state.json"
    whole = state.read_text()
    for damaged in (whole[:20], "[1]", whole.replace('"step": 5', '"step": 3')):
        state.write_text(damaged)
        assert str(state) in train(folder, settings, "--resume", check=2).stderr
    shutil.rmtree(folder / "checkpoints/step-000005")
    shutil.rmtree(folder / "checkpoints/step-000004/megatron")
    assert "step-000004/megatron" in train(folder, settings, "--resume", check=2).stderr


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_the_recipe_runs_under_other_layouts(run, tmp_path, settings, layout):
    chosen = settings | {f"training.layout.{key}": value for key, value in layout.items()} | {"training.steps": 1, "evaluation.every": 0}
    train(tmp_path / "layout", chosen)
    got, want = rows(tmp_path / "layout")[0], rows(run)[1]
    # The same rollouts, since the engine starts from the same weights; loss and gradient norm are means over the step's updates.
    assert got["reward/mean"] == want["reward/mean"]
    assert got["policy/loss"] == pytest.approx(want["policy/loss"], abs=1e-5)
    assert got["policy/grad_norm"] == pytest.approx(want["policy/grad_norm"], rel=1e-5)
