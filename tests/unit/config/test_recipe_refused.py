"""Promise: bad input gets one clear message that names the file, the line or key, what was expected and what to do."""

from __future__ import annotations

import os

import pytest

from megarl.config.load import load_recipe
from megarl.config.recipe import SftRecipe
from megarl.errors import InputError


def refusal(name: str, *overrides: str, kind=None) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(name, overrides, kind) if kind else load_recipe(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("training.learning_rate", "did you mean `training.optimizer.learning_rate`?"),
        ("training.optimizer.learning_rat", "did you mean `training.optimizer.learning_rate`?"),
        ("training.Steps", "did you mean `training.steps`?"),
        ("training.micro-batch-tokens", "did you mean `training.micro_batch_tokens`?"),
        ("trainning.steps", "did you mean `training`?"),
        ("max_response_length", "did you mean `rollout.max_response_length`?"),
        ("rollout.max_prompt_lenght", "did you mean `data.max_prompt_length`?"),
        ("responses_per_prompt", "did you mean `rollout.responses_per_prompt` or `evaluation.responses_per_prompt`?"),
        ("checkpoint.qqqq", "the keys of `checkpoint` are `every`, `keep`"),
        ("training.batch_size", "it belongs to recipes of `megarl sft`"),
    ],
)
def test_unknown_keys_name_the_nearest_known_one(write, minimal, key, suggestion):
    section, _, leaf = key.rpartition(".")
    inner = "".join(f"{part}: {{" for part in section.split(".") if part)
    text = f"base: minimal.yaml\n{inner}{leaf}: 3{'}' * inner.count('{')}\n"
    unknown = "trainning" if section == "trainning" else key
    message = refusal(write("x.yaml", text))
    assert message.startswith(f"x.yaml:2: unknown key `{unknown}`: ") and suggestion in message
    message = refusal(minimal, f"{key}=3")
    assert message.startswith(f"--set: unknown key `{unknown}`: ") and suggestion in message


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.steps=many", "training.steps: expected integer >= 1, given the text 'many'"),
        ("training.steps='3'", "training.steps: expected integer >= 1, given the text '3'"),
        ("training.steps=3.0", "training.steps: expected integer >= 1, given 3.0"),
        ("training.steps=0", "training.steps: expected integer >= 1, given 0"),
        ("training.steps=true", "training.steps: expected integer >= 1, given true"),
        ("training.steps=", "training.steps: expected integer >= 1, given nothing"),
        ("training.steps=[3]", "training.steps: expected integer >= 1, given a list"),
        ("training=3", "training: expected section, given 3"),
        ("training.optimizer.beta1=1", "training.optimizer.beta1: expected number >= 0, < 1, given 1"),
        ("training.optimizer.learning_rate=.inf", "training.optimizer.learning_rate: expected number > 0, given inf"),
        ("training.optimizer.learning_rate=.nan", "training.optimizer.learning_rate: expected number > 0, given nan"),
        ("training.optimizer.learning_rate=true", "training.optimizer.learning_rate: expected number > 0, given true"),
        ("training.precision=fp16", "training.precision: expected `fp32` or `bf16`, given the text 'fp16'"),
        ("data.shuffle=yes", "data.shuffle: expected true or false, given the text 'yes'"),
        ("data.shuffle=1", "data.shuffle: expected true or false, given 1"),
        ("data.evaluation=x.jsonl", "data.evaluation: expected mapping of names to text (not empty), given the text 'x.jsonl'"),
        ("data.evaluation.x=3", "data.evaluation.x: expected text (not empty), given 3"),
        ("data.evaluation.x=", "data.evaluation.x: expected text (not empty), given nothing"),
        ("output=''", "output: expected text (not empty), given the text ''"),
        ("seed.x=1", "seed: expected integer >= 0, < 4294967296, given a mapping"),
        ("evaluation.k=[]", "evaluation.k: expected list of integer >= 1 (not empty), given an empty list"),
        ("evaluation.k=[1, 8, 1]", "evaluation: `k` holds 1 twice (`k`: --set)"),
        ("evaluation.k=[1, x]", "evaluation.k[1]: expected integer >= 1, given the text 'x'"),
        ("rollout.kv_cache_mib=0", "rollout.kv_cache_mib: expected integer >= 1 or null, given 0"),
        ("objective=grpo", "objective: expected mapping, given the text 'grpo'"),
        ("objective.name=3", "objective.name: expected the name of an objective, given 3"),
        ("verifier.args=[]", "verifier.args: expected mapping, given an empty list"),
    ],
)
def test_wrong_values_name_what_was_expected_and_given(minimal, setting, expected):
    assert refusal(minimal, setting) == f"--set: {expected}."


def test_wrong_values_in_a_file_name_its_line(write, minimal_text):
    name = write("x.yaml", minimal_text.replace("{steps: 5}", "\n  epochs: 2\n  steps:\n    many\n"))
    assert refusal(name) == "x.yaml:8: training.steps: expected integer >= 1, given the text 'many'."


def test_a_mistake_in_a_base_names_the_base(write, minimal_text):
    write("b.yaml", minimal_text + "sed: 1\n")
    assert refusal(write("x.yaml", "base: b.yaml\nseed: 1\n")) == "b.yaml:7: unknown key `sed`: did you mean `seed`?"


def test_missing_keys_name_the_files_that_were_searched(write, minimal_text):
    write("b.yaml", minimal_text.replace("output: run\n", "").replace("{steps: 5}", "{epochs: 5}"))
    message = refusal(write("x.yaml", "base: b.yaml\nmodel: {path: m}\n"))
    assert "x.yaml: output: missing, expected text (not empty); looked for in x.yaml, in its base b.yaml and in --set" in message
    assert "b.yaml:5: training.steps: missing, expected integer >= 1; looked for in" in message


def test_a_missing_section_names_its_required_keys(write):
    message = refusal(write("x.yaml", "seed: 1\n"))
    for key in ("output", "model.path", "data.train", "verifier.name", "objective", "training.steps"):
        assert f"x.yaml: {key}: missing" in message
    assert "rollout" not in message


def test_a_missing_objective_name(write, minimal_text):
    message = refusal(write("x.yaml", minimal_text.replace("{name: grpo}", "{clip: 0.2}")))
    assert message.startswith("x.yaml:5: objective.name: missing, expected the name of an objective")


def test_an_emptied_section_says_that_it_replaced_the_base(write, minimal):
    message = refusal(write("x.yaml", "base: minimal.yaml\nmodel: {}\n"))
    assert message.startswith("x.yaml:2: model.path: missing") and "replaces that of the base" in message


def test_keys_that_contradict_each_other_name_their_sources(write, minimal):
    name = write("x.yaml", "base: minimal.yaml\nrollout: {prompts_per_step: 10}\n")
    message = refusal(name, "training.minibatches=4")
    assert "`rollout.prompts_per_step` must be a multiple of `training.minibatches`" in message
    assert "`rollout.prompts_per_step`: x.yaml:2, `training.minibatches`: --set" in message
    message = refusal(minimal, "training.layout.sequence_parallel=true")
    assert message == "--set: training.layout: `sequence_parallel` needs `tensor` > 1 (`sequence_parallel`: --set, `tensor`: default)."
    assert "pass@16" in refusal(minimal, "evaluation.k=[16]")
    assert "`training.old_logprobs`" in refusal(minimal, "rollout.overlap_training=true")


def test_all_mistakes_are_reported_in_order(write, minimal_text):
    name = write("x.yaml", "sed: 1\n" + minimal_text.replace("steps: 5", "steps: 0, lr: 1") + "seed: 1\nseed: 2\n")
    lines = refusal(name, "rollout.engines=0").splitlines()
    assert lines[0] == "x.yaml: 5 mistakes"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == ["x.yaml:1", "x.yaml:7", "x.yaml:7", "x.yaml:9", "--set"]


def test_duplicate_keys_name_both_lines(write, minimal_text):
    message = refusal(write("x.yaml", minimal_text.replace("{steps: 5}", "\n  steps: 5\n  epochs: 1\n  'steps': 6")))
    assert message == "x.yaml:9: duplicate key `steps`: the first is on line 7."


def test_base_in_a_circle(write):
    write("a.yaml", "seed: 1\nbase: b.yaml\n")
    write("b.yaml", "base: ./a.yaml\n")
    assert refusal("a.yaml") == "b.yaml:1: base: `base` goes in a circle: a.yaml -> b.yaml -> a.yaml."


@pytest.mark.parametrize("value", ["[a.yaml]", "", "3", "''"])
def test_base_must_be_one_path(write, value):
    assert refusal(write("x.yaml", f"seed: 1\nbase: {value}\n")).startswith("x.yaml:2: base: expected the path of one recipe")


def test_base_that_is_not_there_names_who_asked(write):
    assert refusal(write("x.yaml", "base: no.yaml\n")).startswith("x.yaml:1: base: no.yaml: no such file")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "x.yaml: is empty"),
        (b"# nothing\n", "x.yaml: is empty"),
        (b"- a\n", "x.yaml:1: a recipe is a mapping of keys to values, this is a list"),
        (b"\nhello\n", "x.yaml:2: a recipe is a mapping of keys to values, this is the text 'hello'"),
        (b"seed: 1\noutput: [a\n", "x.yaml:3: not valid YAML"),
        (b"seed: 1\n\tmodel: 2\n", "x.yaml:2: not valid YAML"),
        (b"seed: 1\n---\nseed: 2\n", "x.yaml:2: not valid YAML"),
        (b"seed: 1\noutput: a\x00b\n", "x.yaml:2: not valid YAML: the character"),
        (b"seed: 1\noutput: \xff\n", "x.yaml:2: is not UTF-8 text (byte 0xff)"),
        ("seed: 1\n".encode("utf-16"), "x.yaml:1: is not UTF-8 text"),
        (b"a: &a 1\nb: *a\n", "x.yaml:2: not valid YAML: an alias"),
        (b"a: &a [*a]\n", "x.yaml:1: not valid YAML: an alias"),
        (b'output: "\\UFFFFFFFF"\n', "x.yaml: not valid YAML: an escape sequence"),
        (b"a: " + b"[" * 2000 + b"]" * 2000, "x.yaml: the values are nested too deeply"),
        (b"a:\n " + b"[" * 50 + b"]" * 50, "x.yaml:2: the values are nested too deeply"),
    ],
)
def test_files_that_are_no_recipes(write, content, expected):
    assert refusal(write("x.yaml", content)).startswith(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x: !!python/object/apply:os.system [ls]", "the tag"),
        ("x: !env HOME", "the tag `!env` is not accepted"),
        ("x: !!int three", "cannot be read as int"),
        ("x: !!bool yes", "cannot be read as bool"),
        (f"x: {'1' * 5000}", "cannot be read as int"),
        ("? [a]\n: 1", "a key must be one word"),
        (r'output: "a\0b"', "NUL"),
        (r'output: "\ud800"', "surrogate"),
        (r'"\ud800": 1', "surrogate"),
    ],
)
def test_values_that_are_no_plain_data(write, minimal_text, line, expected):
    assert expected in refusal(write("x.yaml", f"{minimal_text}{line}\n"))
    assert "x.yaml:7: " in refusal("x.yaml")


def test_paths_that_are_no_files(write, tmp_path):
    write("folder/x", "")
    assert refusal("no.yaml").startswith("no.yaml: no such file")
    assert refusal("folder").startswith("folder: is a folder")
    assert refusal("folder/x/y").startswith("folder/x/y: cannot be read: Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_files_that_may_not_be_read(minimal):
    os.chmod(minimal, 0)
    assert refusal(minimal) == "minimal.yaml: cannot be read: Permission denied."


@pytest.mark.parametrize("setting", ["seed", "=3", "training..steps=3", ".seed=3", "seed =3", ""])
def test_overrides_that_are_no_assignments(minimal, setting):
    assert refusal(minimal, setting).startswith(f"--set {setting}: expected key=value")


def test_overrides_with_bad_values(minimal):
    assert "The value of `seed=[1` is read as YAML" in refusal(minimal, "seed=[1")
    assert refusal(minimal, "objective={a: 1, a: 2}") == "--set: objective: duplicate key `a`: twice in it."
    assert "can only be set in a file" in refusal(minimal, "base=x.yaml")


def test_a_recipe_of_the_other_kind_is_recognised(minimal):
    assert "unknown key `objective`: it belongs to recipes of `megarl train`" in refusal(minimal, kind=SftRecipe)


@pytest.mark.parametrize(
    ("section", "message", "place"),
    [
        ("objective", "unknown parameter `clip_hi` of objective `grpo`; did you mean `clip_high`?", "x.yaml:6: objective: "),
        ("objective", "objective `grpo` takes no parameter `eta`", "--set: "),
        ("objective", "`coef` is -1; expected a number >= 0", "x.yaml:8: objective: "),
        ("objective", "`kl` lacks `where`", "x.yaml:8: objective: "),
        ("objective", "unknown objective `grpoo`", "x.yaml:5: objective: "),
        ("verifier", 'verifier.args: "countdown" has no argument "fromat"', "base.yaml:5: "),
        ("verifier", "verifier.args: f() got an unexpected keyword argument 'fromat'", "base.yaml:5: "),
        ("verifier", 'verifier.name: "countdwn" is not known', "base.yaml:4: "),
    ],
)
def test_what_another_room_refuses_gets_its_place(write, section, message, place):
    """A parameter of the objective or verifier is checked where it is used; the message still names file and line, or --set."""
    write("base.yaml", "model: {path: m}\ndata: {train: t}\nverifier:\n  name: countdown\n  args: {fromat: 1}\ntraining: {steps: 5}\n")
    text = "base: base.yaml\noutput: o\n\nobjective:\n  name: grpo\n  clip_hi: 1\n  kl:\n    coef: -1\n"
    loaded = load_recipe(write("x.yaml", text), ["objective.eta=1"])
    with pytest.raises(InputError) as caught, loaded.naming(section):
        raise InputError(message)
    assert str(caught.value) == place + message.removesuffix(".") + ("" if message.endswith("?") else ".")
