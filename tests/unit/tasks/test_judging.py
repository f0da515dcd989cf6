"""Promise: every verdict has the effect that the recipe states, and a broken verifier stops the run."""

from pathlib import Path

import pytest

from megarl.errors import InputError, RunFailed
from megarl.tasks.dataset import Example
from megarl.tasks.judging import Judge, apply_effects, check_shares
from megarl.tasks.verdict import STATUSES, Verdict

EXAMPLE = Example("a", "p", 3, {"numbers": [1, 2]})


def test_a_pure_verifier_needs_no_process_and_another_gets_one(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with Judge("countdown", {"format": "plain"}) as judge:
        assert judge._pool is None
        assert [v.status for v in judge(["1+2", "2-1"], [EXAMPLE] * 2)] == ["ok", "wrong"]
    with Judge("my_hostile_verifiers:verify", {}, workers=1, timeout_s=0.3) as judge:
        verdicts = judge(["1", "hang", "exits", "0"], [EXAMPLE] * 4)
        assert [v.status for v in verdicts] == ["ok", "timeout", "crash", "wrong"]
    with pytest.raises(InputError, match="is not known"):
        Judge("cuntdown", {})


@pytest.mark.parametrize("timeout", ["zero", "drop"])
@pytest.mark.parametrize("crash", ["zero", "drop"])
def test_effects(timeout, crash):
    verdicts = [Verdict(status, 0.7, vector=((1.0, 0.4),)) for status in STATUSES]
    after = dict(zip(STATUSES, apply_effects(verdicts, {"timeout": timeout, "crash": crash}), strict=True))
    for status in ("ok", "wrong", "unparseable"):
        assert after[status] == verdicts[STATUSES.index(status)]
    for status, kept in (("timeout", timeout == "zero"), ("crash", crash == "zero"), ("skipped", False)):
        assert (after[status].status, after[status].reward, after[status].vector, after[status].in_loss) == (status, 0.0, None, kept)


def test_a_share_above_the_limit_stops_the_run():
    verdicts = [Verdict("ok", 1.0)] * 8 + [Verdict("crash", 0.0, detail="KeyError: 'x'"), Verdict("timeout", 0.0)]
    check_shares(verdicts, {"crash": 0.1, "timeout": 0.1})
    check_shares([], {"crash": 0.0})
    with pytest.raises(RunFailed, match=r"1 of 10 verdicts are `crash`, `verifier.max_crash_share` allows .* 0\.05; .*KeyError: 'x'"):
        check_shares(verdicts, {"crash": 0.05, "timeout": 0.1})
    with pytest.raises(RunFailed, match="1 of 10 verdicts are `timeout`"):
        check_shares(verdicts, {"crash": 0.1, "timeout": 0.0})
