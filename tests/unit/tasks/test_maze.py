"""Promise: a walk is followed move by move, and nothing counts unless it ends at the exit."""

import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.maze import check_examples, make_maze, read_maze

# S . G
# X D .
# . . E   in the corner of the 5 x 5 grid
MAZE = "S11E33G31D22X12"


def example(maze=MAZE):
    return Example("a", "p", "RRDD", {"maze": maze})


@pytest.mark.parametrize(
    ("moves", "status", "vector"),
    [
        ("RRDD", "ok", (1, 1, 0, 1)),
        ("RDRD", "ok", (1, 0, 1, 1)),
        ("RRDLRD", "ok", (1, 1, 1, 1)),
        ("DDRR", "ok", (1, 0, 0, 0)),
        ("UULRRDD", "ok", (1, 1, 0, 1)),  # edges stop
        ("RRDDR", "wrong", (0, 0, 0, 0)),
        ("RRDDRL", "wrong", (0, 0, 0, 0)),  # was at the exit before
        ("RRD", "wrong", (0, 0, 0, 0)),
        ("RL" * 7 + "RRDD", "wrong", (0, 0, 0, 0)),  # 18 moves
        ("RL" * 6 + "RRDD", "ok", (1, 1, 0, 1)),  # 16
        ("rrdd", "unparseable", (0, 0, 0, 0)),
        ("RR DD", "unparseable", (0, 0, 0, 0)),
        ("", "unparseable", (0, 0, 0, 0)),
    ],
)
def test_walks(moves, status, vector):
    verdict = make_maze()(moves, example())
    assert (verdict.status, verdict.vector, verdict.reward) == (status, (vector,), sum(vector) / 4)


def test_arguments():
    assert make_maze("tagged")("so <answer>RRDD</answer>", example()).status == "ok"
    assert make_maze(max_moves=3)("RRDD", example()).status == "wrong"
    several = make_maze(answers=2)("<answer_1>RRDD</answer_1> <answer_2>DDRR</answer_2>", example())
    assert (several.reward, several.vector) == (0.75, ((1, 1, 0, 1), (1, 0, 0, 0)))
    for bad in ({"format": "last_number"}, {"max_moves": 0}, {"answers": 0}, {"answers": "2"}):
        with pytest.raises(InputError, match=r"verifier.args: "):
            make_maze(**bad)


@pytest.mark.parametrize("maze", [None, "", "S11E33G31", "S11S12E33G31D22", "S11E33G31D61", "S11E11G31D22", "S11E33G31D22.", "S11E33G31D2"])
def test_what_is_no_maze(maze):
    check_examples([example()])
    with pytest.raises(InputError, match=r'example "a": maze needs `metadata\.maze`'):
        check_examples([example(maze)])
    assert read_maze(MAZE).lava == {(1, 2)}
