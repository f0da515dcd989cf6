"""Grid maze with more than one aim: reach the exit, pick up gold and diamond on the way, keep out of the lava.

A maze is text, one "tag column row" triple per object, each counted from 1: `S23E54G11D32X25X41` has the start S in column 2 of row 3,
the exit E, gold G, a diamond D, and two cells of lava X. An example has it as `metadata.maze`, and one way out as `answer`.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import AnswerFormat, check_format, extract_answer
from megarl.tasks.several import judge_each
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

SIZE = 5
MAX_MOVES = 16
MOVES = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}
OBJECT = re.compile(r"([SEGDX])([1-9])([1-9])")

Cell = tuple[int, int]


@dataclass(frozen=True)
class Maze:
    start: Cell
    exit: Cell
    gold: Cell
    diamond: Cell
    lava: frozenset[Cell]


def read_maze(text: str) -> Maze | None:
    """The maze of a text; None unless it has one start, exit, gold and diamond, and each object a cell of its own within the grid."""
    objects = [(tag, (int(column), int(row))) for tag, column, row in OBJECT.findall(text)]
    cells = [cell for _, cell in objects]
    inside = all(max(cell) <= SIZE for cell in cells)
    tags = [tag for tag, _ in objects]
    if OBJECT.sub("", text) or not inside or len(set(cells)) < len(cells) or any(tags.count(tag) != 1 for tag in "SEGD"):
        return None
    one = {tag: cell for tag, cell in objects if tag != "X"}
    return Maze(one["S"], one["E"], one["G"], one["D"], frozenset(cell for tag, cell in objects if tag == "X"))


def step(cell: Cell, move: str) -> Cell:
    """The cell after a move; the edge of the grid stops it."""
    moved = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
    return moved if all(1 <= part <= SIZE for part in moved) else cell


def walk(maze: Maze, moves: str) -> tuple[bool, bool, bool, bool]:
    """(ends at the exit and comes there the first time, gold, diamond, no lava) of a walk; the first is False for moves after the exit."""
    cells = [maze.start]
    for move in moves:
        cells.append(step(cells[-1], move))
    arrived = cells[-1] == maze.exit and maze.exit not in cells[:-1]
    return arrived, maze.gold in cells, maze.diamond in cells, not maze.lava & set(cells)


def make_maze(format: AnswerFormat = "plain", max_moves: int = MAX_MOVES, answers: int | None = None) -> Verifier:
    """The verifier `maze`. The answer is a row of moves, U D L R; the walk must end where it first comes to the exit.

    format: `plain` (the whole response) or `tagged` (the last <answer>...</answer>). max_moves: a longer walk is wrong.
    answers: so many numbered answers in a response (see `judge_each`), each as `format` says.

    Reward vector: exit, gold, diamond, no lava; all 0 unless the exit is reached. Reward: their mean.
    Verdicts: `ok` if the exit is reached; `unparseable` if the answer is not a row of moves.
    """
    check_format(format, ("plain", "tagged"))
    if isinstance(max_moves, bool) or not isinstance(max_moves, int) or max_moves < 1:
        raise InputError(f"verifier.args: max_moves must be an integer >= 1, got {max_moves!r}.")

    def verify(response: str, example: Example) -> Verdict:
        maze = read_task(example)
        moves = extract_answer(response, format)
        if moves is None or not set(moves) <= set(MOVES):
            return Verdict("unparseable", 0.0, detail="no row of moves", vector=((0.0,) * 4,))
        if len(moves) > max_moves:
            return Verdict("wrong", 0.0, moves, f"{len(moves)} moves, at most {max_moves} are allowed", ((0.0,) * 4,))
        reached = walk(maze, moves)
        if not reached[0]:
            return Verdict("wrong", 0.0, moves, "does not end at the exit", ((0.0,) * 4,))
        return Verdict("ok", sum(reached) / 4, moves, vector=(tuple(map(float, reached)),))

    return judge_each(verify, answers)


def read_task(example: Example) -> Maze:
    """The maze of an example; InputError naming its id if it has none."""
    text = example.metadata.get("maze")
    maze = read_maze(text) if isinstance(text, str) else None
    if maze is None:
        raise InputError(
            f'example "{example.id}": maze needs `metadata.maze` such as S23E54G11D32X25X41: one S, E, G and D and any number of X, '
            f"each in a cell of its own from 11 to {SIZE}{SIZE}, got {text!r}."
        )
    return maze


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `maze` cannot judge."""
    for example in examples:
        read_task(example)


# ------------------------------------------------------------------ making one
def random_maze(rng: random.Random, lava: int = 2) -> str:
    """A maze as text, its objects in cells drawn without replacement."""
    cells = rng.sample([(column, row) for column in range(1, SIZE + 1) for row in range(1, SIZE + 1)], 4 + lava)
    return "".join(f"{tag}{column}{row}" for tag, (column, row) in zip("SEGD" + "X" * lava, cells, strict=True))


def route(maze: Maze, stops: Sequence[Cell], rng: random.Random) -> str | None:
    """Moves from the start over the stops to the exit, each leg a random one of the shortest that keep out of lava and, before the last
    leg, of the exit. None if there is no way.
    """
    moves, cell = "", maze.start
    for target in (*stops, maze.exit):
        distances = _distances(target, maze.lava if target == maze.exit else maze.lava | {maze.exit})
        if cell not in distances:
            return None
        while cell != target:
            move = rng.choice([move for move in MOVES if distances.get(step(cell, move), SIZE**2) < distances[cell]])
            moves, cell = moves + move, step(cell, move)
    return moves


def _distances(target: Cell, closed: Set[Cell]) -> dict[Cell, int]:
    """Moves from each cell to the target without the closed cells."""
    distances, queue = {target: 0}, deque([target])
    while queue:
        cell = queue.popleft()
        for move in MOVES:  # a move has its opposite, so ways to the target are ways from it
            near = step(cell, move)
            if near not in closed and near not in distances:
                distances[near] = distances[cell] + 1
                queue.append(near)
    return distances
