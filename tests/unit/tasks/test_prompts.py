"""Promise: what the model is given is the prompt, tokenised once by the rule in the docstring; everything else is refused by name."""

import contextlib
import json
import subprocess
import sys

import pytest
from tokenizers.processors import TemplateProcessing

from megarl.errors import InputError
from megarl.models.create import character_tokenizer
from megarl.tasks.dataset import Example
from megarl.tasks.prompts import eos_token_ids, load_tokenizer, tokenize

EOS = 1


def add_special_tokens(tokenizer, single):
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<pad>", "<eos>") if token in single]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


def test_plain_prompt_is_tokenised_as_it_is(tokenizer):
    example = Example("a", "12+3=", 15)
    prompts, dropped = tokenize([example], tokenizer, 10)
    assert dropped == 0
    assert prompts[0].token_ids == (3, 4, 15, 5, 13)
    assert (prompts[0].id, prompts[0].text, prompts[0].example) == ("a", "12+3=", example)


def test_plain_prompt_gets_the_tokenizers_own_bos_but_no_eos(tokenizer):
    add_special_tokens(tokenizer, "<pad> $A <eos>")
    assert tokenizer("12")["input_ids"] == [0, 3, 4, 1]
    assert tokenize([Example("a", "12", 0)], tokenizer, 10)[0][0].token_ids == (0, 3, 4)
    # an EOS that the prompt itself ends in stays
    assert tokenize([Example("a", "12<eos>", 0)], tokenizer, 10)[0][0].token_ids == (0, 3, 4, 1)


def test_chat_template_is_applied_exactly_once_and_nothing_is_added(tokenizer):
    add_special_tokens(tokenizer, "<pad> $A <eos>")
    messages = Example("m", [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], 0)
    plain = Example("p", "2", 0)
    for chat in (False, True):
        prompt = tokenize([messages], tokenizer, 10, chat=chat)[0][0]
        assert prompt.text == "<eos>(1)(2)="
        assert prompt.token_ids == (EOS, 19, 3, 20, 19, 4, 20, 13)
    assert tokenize([plain], tokenizer, 10, chat=True)[0][0].text == "<eos>(2)="
    assert tokenize([plain], tokenizer, 10, chat=False)[0][0].text == "2"


def test_prompts_that_cannot_be_rendered_or_tokenised_are_named(tokenizer):
    with pytest.raises(InputError, match=r'"a": the chat template refuses its prompt .*no tools here'):
        tokenize([Example("a", [{"role": "tool", "content": "1"}], 0)], tokenizer, 10)
    with pytest.raises(InputError, match=r'"b": the tokenizer refuses its prompt'):
        tokenize([Example("b", "12x", 0)], tokenizer, 10)
    tokenizer.chat_template = None
    for example, chat in ((Example("c", [{"role": "user", "content": "1"}], 0), False), (Example("c", "1", 0), True)):
        with pytest.raises(InputError, match=r'"c": .* has no chat template'):
            tokenize([example], tokenizer, 10, chat=chat)


def test_too_long_prompts(tokenizer):
    examples = [Example("a", "1234", 0), Example("b", "12345", 0), Example("c", "1", 0)]
    with pytest.raises(InputError, match=r'"b": its prompt has 5 tokens, `data.max_prompt_length` is 4'):
        tokenize(examples, tokenizer, 4)
    prompts, dropped = tokenize(examples, tokenizer, 4, too_long="drop")
    assert ([prompt.id for prompt in prompts], dropped) == (["a", "c"], 1)
    with pytest.raises(InputError, match=r"all 3 are longer"):
        tokenize(examples, tokenizer, 0, too_long="drop")


def test_prompts_cut_on_the_left(tokenizer):
    examples = [Example("a", "1234", 0), Example("b", "12345", 0)]
    prompts, cut = tokenize(examples, tokenizer, 4, too_long="cut_left")
    assert cut == 1
    assert [(prompt.id, prompt.text, prompt.token_ids) for prompt in prompts] == [
        ("a", "1234", (3, 4, 5, 6)),
        ("b", "2345", (4, 5, 6, 7)),
    ]
    tokenizer.bos_token = "1"  # what begins every prompt of a model must not be cut off
    prompts, _ = tokenize(examples, tokenizer, 3, too_long="cut_left")
    assert [prompt.token_ids for prompt in prompts] == [(3, 5, 6), (3, 6, 7)]


def test_load_tokenizer(tmp_path):
    character_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good")("1+2")["input_ids"] == [3, 15, 4]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match=r"empty: holds no tokenizer; expected one of tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(InputError, match=r"nowhere: no such model folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "", "EOF while parsing a value at line 1 column 0"),
        ("tokenizer.json", "[]", "invalid type: sequence, expected struct Tokenizer"),
        ("tokenizer.json", '{"model": {"type": "WordLevel"}}', "missing field `"),
        ("tokenizer_config.json", "{", "Expecting property name enclosed in double quotes"),
    ],
)
def test_a_damaged_tokenizer_is_named_with_its_file_and_fault(tmp_path, name, content, reason):
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=rf"^{tmp_path}: its tokenizer cannot be loaded \({name}: {reason}.*\)\.$"):
        load_tokenizer(tmp_path)


def test_code_in_a_tokenizer_folder_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    character_tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(InputError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def write_model(tmp_path, generation, config, eos_of_tokenizer=True):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_text(content)
    if eos_of_tokenizer:
        character_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_eos_is_the_union_of_all_places(tmp_path):
    assert eos_token_ids(write_model(tmp_path, '{"eos_token_id": [7, 5]}', '{"eos_token_id": 5}', False), 32) == (5, 7)
    assert eos_token_ids(write_model(tmp_path, None, '{"eos_token_id": 0}', False), 32) == (0,)
    assert eos_token_ids(write_model(tmp_path, '{"eos_token_id": [7, 5]}', '{"eos_token_id": null}'), 32) == (1, 5, 7)
    assert eos_token_ids(write_model(tmp_path, None, None), 32) == (1,)


def test_no_or_bad_eos_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no end-of-sequence token; set `eos_token_id` in its generation_config.json"):
        eos_token_ids(write_model(tmp_path, None, "{}", False), 32)
    for bad in ('"x"', "-1", "true", "[1, null]", "1.5"):
        with pytest.raises(InputError, match=r"generation_config.json: `eos_token_id` must be"):
            eos_token_ids(write_model(tmp_path, f'{{"eos_token_id": {bad}}}', None, False), 32)
    with pytest.raises(InputError, match=r"config.json: not JSON"):
        eos_token_ids(write_model(tmp_path, None, "{", False), 32)
    with pytest.raises(InputError, match=r"no such model folder"):
        eos_token_ids(tmp_path / "nowhere", 32)


def test_an_eos_that_the_model_has_not_is_refused(tmp_path):
    for name, files in (("generation_config.json", ('{"eos_token_id": [1, 8]}', None)), ("config.json", (None, '{"eos_token_id": 8}'))):
        with pytest.raises(InputError, match=rf"/{name}: `eos_token_id` 8 is no token of the model, whose `vocab_size` is 8\."):
            eos_token_ids(write_model(tmp_path, *files, False), 8)
        assert 8 in eos_token_ids(tmp_path, 9)
    with pytest.raises(InputError, match=r"its tokenizer's end-of-sequence token, 1, is no token of the model"):
        eos_token_ids(write_model(tmp_path, None, None), 1)


def test_reading_data_and_judging_needs_no_heavy_package():
    code = (
        "import sys; from megarl.tasks import prompts, stream, countdown, create; import megarl.evaluation.metrics; "
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'megatron', 'reasoning_gym', 'sympy', 'pyarrow'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
