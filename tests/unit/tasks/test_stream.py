"""Promise: every prompt once per epoch, none twice in a take, and a resumed stream goes on exactly where the saved one was."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.prompts import Prompt
from megarl.tasks.stream import PromptStream, make_stream


def make_prompts(count, answer=0):
    return [Prompt(f"d:{i}", (i,), str(i), Example(f"d:{i}", str(i), answer)) for i in range(count)]


def ids(prompts):
    return [int(prompt.text) for prompt in prompts]


@st.composite
def runs(draw):
    """(number of prompts, seed, shuffle, sizes of the takes)"""
    count = draw(st.integers(1, 12))
    return count, draw(st.integers(0, 5)), draw(st.booleans()), draw(st.lists(st.integers(0, count), min_size=1, max_size=25))


@settings(deadline=None, max_examples=100)
@given(runs())
def test_each_prompt_once_per_epoch_and_never_twice_in_a_take(run):
    count, seed, shuffle, sizes = run
    stream = PromptStream(make_prompts(count), seed, shuffle)
    flat = []
    for size in sizes:
        taken = ids(stream.take(size))
        assert len(taken) == size == len(set(taken))
        flat += taken
        assert stream.epoch == max(len(flat) - 1, 0) // count
    for start in range(0, len(flat), count):
        epoch = flat[start : start + count]
        assert len(set(epoch)) == len(epoch)


@settings(deadline=None, max_examples=100)
@given(runs(), st.data())
def test_resume_from_any_position_gives_the_same_prompts(run, data):
    count, seed, shuffle, sizes = run
    stop = data.draw(st.integers(0, len(sizes)))
    stream = PromptStream(make_prompts(count), seed, shuffle)
    for size in sizes[:stop]:
        stream.take(size)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(make_prompts(count), seed, shuffle)
    resumed.take(min(3, count))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for size in sizes[stop:]:
        assert ids(resumed.take(size)) == ids(stream.take(size))
    assert resumed.state_dict() == stream.state_dict()


def test_order_depends_on_seed_and_epoch():
    def epochs(seed):
        stream = PromptStream(make_prompts(50), seed)
        return [ids(stream.take(50)) for _ in range(2)]

    assert epochs(0) == epochs(0)
    orders = epochs(0) + epochs(1)
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffle_the_order_is_that_of_the_file():
    stream = PromptStream(make_prompts(4), 0, shuffle=False)
    assert ids(stream.take(3)) == [0, 1, 2]
    # 3 ends the epoch; 0 and 1 begin the next
    assert ids(stream.take(3)) == [3, 0, 1]
    # 2 is left; 3 was not deferred, it comes in its place
    assert ids(stream.take(2)) == [2, 3]


def test_prompts_of_a_crossing_take_are_deferred_not_lost():
    stream = PromptStream(make_prompts(4), 0, shuffle=False)
    stream.take(1)
    assert ids(stream.take(4)) == [1, 2, 3, 0]
    stream.take(2)
    assert ids(stream.take(4)) == [3, 0, 1, 2]
    assert ids(stream.take(1)) == [3]


def test_state_stays_small():
    stream = PromptStream(make_prompts(5000), 0)
    for _ in range(200):
        stream.take(64)
    assert len(json.dumps(stream.state_dict())) < 2000


def test_a_take_larger_than_the_data_is_refused():
    stream = PromptStream(make_prompts(3), 0)
    stream.check_batch(3)
    with pytest.raises(InputError, match=r"takes 4 prompts .* holds 3"):
        stream.check_batch(4)
    with pytest.raises(InputError, match=r"takes 4 prompts"):
        stream.take(4)
    with pytest.raises(InputError, match=r"no prompts"):
        PromptStream([], 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: PromptStream(make_prompts(9), 1), "data set of 10 prompts, this one has 9"),
        (lambda: PromptStream(make_prompts(10, answer=1), 1), "another data set of 10 prompts"),
        (lambda: PromptStream(make_prompts(10)[::-1], 1), "another data set of 10 prompts"),
        (lambda: PromptStream(make_prompts(10), 2), "seed 1, the recipe now says 2"),
        (lambda: PromptStream(make_prompts(10), 1, shuffle=False), "shuffle True, the recipe now says False"),
    ],
)
def test_the_state_of_another_run_is_refused(other, message):
    saved = PromptStream(make_prompts(10), 1)
    saved.take(7)
    stream = other()
    before = stream.state_dict()
    with pytest.raises(InputError, match=message):
        stream.load_state_dict(saved.state_dict())
    assert stream.state_dict() == before


@pytest.mark.parametrize(
    "damage",
    [{"position": 11}, {"position": -1}, {"epoch": "1"}, {"deferred": [10]}, {"deferred": [1, 1]}, {"head": 11}, {"position": None}],
)
def test_a_damaged_state_is_refused(damage):
    stream = PromptStream(make_prompts(10), 1)
    state = stream.state_dict()
    with pytest.raises(InputError, match=r"damaged"):
        stream.load_state_dict(state | damage)
    del state[next(iter(damage))]
    with pytest.raises(InputError, match=f"lacks {next(iter(damage))}"):
        stream.load_state_dict(state)
    assert stream.state_dict() == PromptStream(make_prompts(10), 1).state_dict()


# ------------------------------------------------------------------- mixtures
def mixture(make_prompts, weights=None, sizes=None, seed=3):
    weights = weights or {"a": 3.0, "b": 1.0, "c": 0.5}
    sizes = sizes or {"a": 20, "b": 7, "c": 40}

    def read(path):
        return [replace(prompt, id=f"{path}{i}") for i, prompt in enumerate(make_prompts(sizes[path]))]

    return make_stream(weights, read, seed, True)


def test_every_stretch_of_a_mixture_has_its_proportions(make_prompts):
    stream = mixture(make_prompts)
    taken = [prompt.id[0] for _ in range(50) for prompt in stream.take(9)]
    for end in range(1, len(taken) + 1):
        for name, weight in (("a", 3.0), ("b", 1.0), ("c", 0.5)):
            assert abs(taken[:end].count(name) - end * weight / 4.5) < 1.5
    assert (len(stream), len(stream.prompts)) == (67, 67)
    assert stream.prompts[0].id == "a:a0"


def test_a_source_of_a_mixture_goes_through_its_own_epochs(make_prompts):
    stream = mixture(make_prompts)
    ids = [prompt.id for _ in range(40) for prompt in stream.take(9)]
    of_b = [identity for identity in ids if identity.startswith("b:")]
    assert all(len(set(of_b[i : i + 7])) == 7 for i in range(0, len(of_b) - 6, 7))
    for start in range(0, len(ids), 9):
        assert len(set(ids[start : start + 9])) == 9


def test_a_mixture_goes_on_where_it_was(make_prompts):
    stream = mixture(make_prompts)
    for _ in range(11):
        stream.take(9)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [stream.take(9) for _ in range(10)]
    again = mixture(make_prompts)
    again.load_state_dict(state)
    assert [again.take(9) for _ in range(10)] == expected


def test_what_a_mixture_refuses(make_prompts):
    stream = mixture(make_prompts)
    with pytest.raises(InputError, match=r"up to 41 of its 60 prompts .* from a, which holds 20"):
        stream.check_batch(60)
    stream.check_batch(9)
    state = stream.state_dict()
    with pytest.raises(InputError, match="was started with the data a, b, c, the recipe now names a, b"):
        mixture(make_prompts, {"a": 1.0, "b": 1.0}).load_state_dict(state)
    with pytest.raises(InputError, match="was started with a data set of 40 prompts, this one has 41"):
        mixture(make_prompts, sizes={"a": 20, "b": 7, "c": 41}).load_state_dict(state)
    with pytest.raises(InputError, match="is not that of a mixture"):
        stream.load_state_dict(PromptStream(make_prompts(3), 0).state_dict())
    with pytest.raises(InputError, match="lacks"):
        PromptStream(make_prompts(3), 0).load_state_dict(state)
