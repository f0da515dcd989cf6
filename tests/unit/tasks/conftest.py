import pytest

from megarl.models.create import character_tokenizer
from megarl.tasks.dataset import Example
from megarl.tasks.prompts import Prompt

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def tokenizer():
    """Real character tokenizer with a chat template that writes its special token itself."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "<eos>" + TEMPLATE
    return tokenizer


@pytest.fixture
def make_prompts():
    def make(count, answer=0):
        return [Prompt(f"d:{i}", (i,), str(i), Example(f"d:{i}", str(i), answer)) for i in range(count)]

    return make
