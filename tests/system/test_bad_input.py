"""Whatever is wrong with the input: one message that names it, no traceback, exit code 2, nothing left behind, nothing started."""

import json
import shutil

import pytest

from megarl.cli import main
from tests.system.conftest import QUICKSTART, megarl, overrides

pytestmark = pytest.mark.system


def lines(path, edit):
    """A data file with its third line edited."""
    content = path.read_text().splitlines()[:80]
    content[2] = edit(content[2])
    return "\n".join(content) + "\n"


def without(key):
    return lambda line: json.dumps({k: v for k, v in json.loads(line).items() if k != key})


@pytest.mark.parametrize(
    "key, content, said",
    [
        ("data.train", lambda path: lines(path, lambda line: line[:-5]), "line 3"),
        ("data.train", lambda path: lines(path, without("answer")), "line 3"),
        ("data.train", lambda path: lines(path, without("metadata")), "numbers"),
        ("data.train", lambda path: "", "no examples"),
        ("data.evaluation.countdown", lambda path: lines(path, lambda line: "[1]"), "line 3"),
    ],
)
def test_data(settings, tmp_path, capsys, key, content, said):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content(settings["data.train"]))
    refused(settings | {key: bad}, tmp_path, capsys, str(bad) if said != "numbers" else said, said)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"training.layout.tensor": 3}, ["training.layout.tensor = 3", "4 attention heads"]),
        ({"training.layout.pipeline": 3}, ["training.layout.pipeline = 3", "4 layers"]),
        ({"training.lerning_rate": 1}, ["training.lerning_rate", "learning_rate"]),
        ({"training.stesp": 1}, ["training.stesp", "training.steps"]),
        ({"data.train": "nowhere.jsonl"}, ["nowhere.jsonl"]),
        ({"model.path": "nowhere"}, ["nowhere"]),
        ({"verifier.name": "cuontdown"}, ["cuontdown", "countdown"]),
        ({"verifier.name": "no.such:function"}, ["no.such"]),
        ({"verifier.args.fromat": "plain"}, ["fromat", "format"]),
        ({"objective.name": "grpoo"}, ["grpoo", "grpo"]),
        ({"objective.clip_hi": 0.2}, ["clip_hi", "clip_high"]),
        ({"objective.name": "ppo"}, ["ppo", "value model"]),
        ({"rollout.prompts_per_step": 100_000}, ["100000", "rollout.prompts_per_step"]),
        ({"rollout.max_response_length": 1000}, ["128 positions", "rollout.max_response_length"]),
        ({"data.max_prompt_length": 3}, ["data.max_prompt_length"]),
        ({"rollout.temperature": 0}, ["rollout.temperature"]),
        ({"rollout.temperature": 0.001}, ["rollout.temperature"]),
        ({"evaluation.temperature": 3}, ["evaluation.temperature"]),
        ({"seed": 2**63}, ["seed"]),
        ({"training.steps": "many"}, ["training.steps"]),
        ({"rollout.tensor_parallel": 2}, ["rollout.tensor_parallel = 2", "rollout.engines"]),
        ({"evaluation.k": "[]"}, ["evaluation.k", "not empty"]),
        ({"evaluation.k": "[8, 8]"}, ["`k` holds 8 twice"]),
        ({"objective.clip_high": -1}, ["--set: objective: `clip_high` is -1"]),
        ({"verifier.args.format": "xml"}, ["--set: verifier.args: `format` is 'xml'"]),
        ({"training.step_lists": '{separators: ["+"]}'}, ["training.step_lists", "`grpo`", "lpo"]),
        (
            {"training.step_lists": '{separators: ["+"]}', "objective": "{name: lpo, overlong: mask}"},
            ["training.step_lists: `overlong`", "whole responses"],
        ),
        ({"objective": "{name: grpo, correction: {kind: token_tis, high: 2}}"}, ["`correction` would be without effect"]),
    ],
)
def test_recipe(settings, tmp_path, capsys, changes, said):
    refused(settings | changes, tmp_path, capsys, *said)


def test_parameters_of_objective_and_verifier_are_refused_with_their_line(settings, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    for line, said in (("objective: {clip_hi: 0.2}", "`clip_hi`"), ("verifier: {args: {fromat: plain}}", "fromat")):
        recipe.write_text(f"base: {QUICKSTART}\n\n{line}\n")
        refused(settings, tmp_path, capsys, f"error: {recipe}:3: ", said, recipe=recipe)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("model.safetensors", b"\x00\x10", ["model.safetensors", "cannot be read as safetensors"]),
        ("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": "gone.safetensors"}}', ["gone.safetensors"]),
        ("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": 3}}', ["files that are not there: 3"]),
        ("tokenizer.json", b"[]", ["tokenizer.json: invalid type: sequence"]),
        ("tokenizer_config.json", b"{", ["tokenizer_config.json: Expecting property name"]),
        ("generation_config.json", b'{"eos_token_id": [1, 32]}', ["generation_config.json", "`eos_token_id` 32", "`vocab_size` is 32"]),
        ("generation_config.json", b"\xff", ["generation_config.json", "not JSON"]),
        ("config.json", b"{", ["config.json", "JSON"]),
    ],
)
def test_a_damaged_model_folder(settings, tmp_path, capsys, name, content, said):
    shutil.copytree(settings["model.path"], tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    refused(settings | {"model.path": tmp_path / "model"}, tmp_path, capsys, str(tmp_path / "model"), *said)


def test_a_demonstration_that_the_warm_up_cannot_use(settings, tmp_path, capsys):
    data = tmp_path / "bad.jsonl"
    recipe = QUICKSTART.with_name("quickstart_sft.yaml")
    chosen = {"model.path": settings["model.path"], "data.train": data}
    for text, said in (("1+x", "refuses its demonstration '1+x'"), ("1+" * 100, "128 positions")):
        data.write_text(json.dumps({"prompt": "1 2 3=6:", "answer": 6, "demonstrations": ["1+2+3", text]}) + "\n")
        refused(chosen, tmp_path, capsys, 'example "bad:1"', said, recipe=recipe, command="sft")


def test_a_model_folder_without_weights(settings, tmp_path, capsys):
    shutil.copytree(settings["model.path"], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    refused(settings | {"model.path": tmp_path / "model"}, tmp_path, capsys, str(tmp_path / "model"), "no weights")


def test_a_model_folder_without_a_tokenizer(settings, tmp_path, capsys):
    shutil.copytree(settings["model.path"], tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(settings | {"model.path": tmp_path / "model"}, tmp_path, capsys, str(tmp_path / "model"), "tokenizer")


@pytest.mark.parametrize(
    "arguments", [("train",), ("train", "nowhere.yaml"), ("trian", "x"), ("report", "nowhere"), ("eval", QUICKSTART, "--model", "nowhere")]
)
def test_command_line(arguments):
    said = megarl(*arguments, check=2).stderr
    assert "Traceback" not in said and said.strip()


def refused(settings, tmp_path, capsys, *said, recipe=QUICKSTART, command="train"):
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(recipe), *overrides({"output": tmp_path / "run", **settings})]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message and message.startswith("megarl: error: ")
    assert message.endswith((".\n", "?\n"))
    for text in said:
        assert str(text) in message, message
    assert sorted(tmp_path.rglob("*")) == before
