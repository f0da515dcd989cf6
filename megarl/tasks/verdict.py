"""What a verifier says about one response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["ok", "wrong", "unparseable", "timeout", "crash", "skipped"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    ok: right. wrong: an answer was found and it is not right. unparseable: no answer of the asked form was found.
    timeout / crash: the verifier did not finish / failed, so nothing is known about the response. skipped: not judged on purpose.
    """

    status: Status
    reward: float
    extracted: Any = None
    detail: str = ""
    vector: tuple[tuple[float, ...], ...] | None = None
    """[m, k] k rewards for each of the m answers in the response; m = 0: none could be parsed. None: the verifier gives no vectors."""
    in_loss: bool = True
    """Whether the response is trained on; if not, it takes no part in its group's statistics either."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r}: expected one of {', '.join(STATUSES)}")

    @property
    def correct(self) -> bool:
        return self.status == "ok"


@dataclass
class VerdictCounts:
    """How many verdicts had which status."""

    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> VerdictCounts:
        return cls(Counter(verdict.status for verdict in verdicts))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __add__(self, other: VerdictCounts) -> VerdictCounts:
        return VerdictCounts(self.counts + other.counts)

    def shares(self) -> dict[str, float]:
        """{"verdict/<status>": share of all verdicts} for every status; all 0 when there are no verdicts."""
        return {f"verdict/{status}": self.counts[status] / max(self.total, 1) for status in STATUSES}
