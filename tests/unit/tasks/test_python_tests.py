"""Promise: generated programs are judged by tests that they cannot reach, and can reach nothing else."""

import os
import shutil
import time
from pathlib import Path

import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.judging import Judge
from megarl.tasks.python_tests import check_examples, find_program, make_python_tests

SQUARE = ["assert f(2) == 4", "assert f(3) == 9", {"call": "f", "args": [4], "expect": 16}]
RIGHT = "def f(x):\n    return x * x\n"
BOUNDED = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")),
    "rlimits",
]


def script(stdin, stdout):
    return {"stdin": stdin, "stdout": stdout}


def fenced(code):
    return f"I think so:\n```python\n{code}\n```\nThat is it."


@pytest.fixture(scope="module", params=BOUNDED)
def verify(request):
    return make_python_tests(sandbox=request.param, time_s=2.0)


@pytest.fixture(scope="module")
def contained():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return make_python_tests(time_s=2.0)


def judge(verify, code, tests, setup=""):
    return verify(fenced(code), Example("a", "p", None, {"tests": tests, "test_setup": setup}))


@pytest.mark.parametrize(
    ("code", "tests", "vector"),
    [
        (RIGHT, SQUARE, (1, 1, 1)),
        ("def f(x):\n    return x * x if x < 3 else 0", SQUARE, (1, 0, 0)),
        ("def f(x) return", SQUARE, (0, 0, 0)),
        ("def g(x): return x", SQUARE, (0, 0, 0)),
        (RIGHT, ["import math\nassert math.isclose(f(0.1), 0.01)", "def check(c):\n    assert c(2) == 4\ncheck(f)"], (1, 1)),
        ("def f(n):\n    for i in range(n): yield i", ["assert list(f(3)) == [0, 1, 2]"], (1,)),
        ("def f(x): return {(1, 2): {3}}, b'x', 1j, None, frozenset([4])", ["assert f(0) == ({(1, 2): {3}}, b'x', 1j, None, {4})"], (1,)),
        ("def f(x): raise ValueError('no')", ["try: f(1)\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert 0"], (1,)),
        ("class Solution:\n    def f(self, x): return x, 0.1 + 0.2", [{"call": "Solution().f", "args": [1], "expect": [1, 0.3]}], (1,)),
        ("def f(a, b=0): return a - b", [{"call": "f", "args": [5], "kwargs": {"b": 2}, "expect": 3}], (1,)),
        ("def f(a): return a", [{"call": "f", "args": [1], "expect": True}], (0,)),
        ("print(2 * int(input()))", [script("3\n", "6\n"), script("4", " 8"), script("x", "")], (1, 1, 0)),
        ("if __name__ == '__main__':\n    print('a ', '', sep='\\n')", [script("", "a"), script("", "b")], (1, 0)),
        ("print(6)\nraise SystemExit(1)", [{"stdin": "", "stdout": "6"}], (0,)),
    ],
)  # fmt: skip
def test_programs(verify, code, tests, vector):
    verdict = judge(verify, code, tests)
    assert verdict.vector == (vector,), verdict.detail
    assert verdict.reward == pytest.approx(sum(vector) / len(vector))
    assert verdict.status == ("ok" if all(vector) else "wrong")


def test_setup_comes_before_each_test(verify):
    assert judge(verify, RIGHT, ["assert f(two) == 4", "assert f(two) == 4"], "two = 2\nprint('noise')").vector == ((1, 1),)


HOSTILE = {
    "ends before the tests": "import os\nos._exit(0)",
    "ends within a test": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "hangs": "def f(x):\n    while True: pass",
    "sleeps": "import time\ndef f(x): time.sleep(100)",
    "endless output": "def f(x):\n    while True: print('x' * 1000)",
    "memory hog": "def f(x): return len(bytearray(4 << 30))",
    "creeping memory hog": "def f(x):\n    a = []\n    while True: a.append(bytearray(1 << 22))",
    "equal to everything": "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "not plain data": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "patches the interpreter": "import builtins, json, sys\nbuiltins.AssertionError = None\njson.dumps = lambda *a: '{\"value\": true}'\n"
    "builtins.abs = lambda x: 0\ndef f(x): return 1",
    "answers for itself": "import json, socket, struct, sys\nc = socket.socket(fileno=json.loads(sys.argv[1])['channel'])\n"
    "while True: c.sendall(struct.pack('<I', 15) + b'{\"value\": true}')",
    "closes its files": "import os\nos.closerange(0, 50)\ndef f(x): return x * x",
    "huge value": "def f(x): return 'x' * (1 << 26)",
    "deep value": "def f(x):\n    a = []\n    for i in range(100000): a = [a]\n    return a",
    "claims that an assertion failed elsewhere": "def f(x): raise AssertionError",
    "huge file": "import tempfile\nt = tempfile.TemporaryFile()\nfor i in range(64): t.write(b'0' * (1 << 20))\n"
    "t.flush()\ndef f(x): return x * x",
}  # fmt: skip

REACHING_OUT = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that hides": "import os\ntry:\n    while True: os.fork()\nexcept OSError: pass\ndef f(x):\n    while True: pass",
    "threads": "import threading\nthreading.Thread(target=print).start()\ndef f(x): return x * x",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'])\ndef f(x): return x * x",
    "writes to the system": "open('/usr/x', 'w').close()\ndef f(x): return x * x",
    "reads passwords": "open('/etc/passwd').read()\ndef f(x): return x * x",
    "reads this repository": f"import os\nos.listdir({str(Path(__file__).parent)!r})\ndef f(x): return x * x",
    "local network": "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\ndef f(x): return x * x",
    "network": "import socket\ns = socket.socket()\ns.connect(('192.0.2.1', 80))\ndef f(x): return x * x",
    "kills everything": "import os\nos.kill(-1, 9)\ndef f(x): return x * x",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x):\n    while True: pass",
    "ignores signals": "import signal\nfor s in range(1, 32):\n    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
    "def f(x):\n    while True: pass",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail_their_tests(verify, name):
    began = time.monotonic()
    verdict = judge(verify, HOSTILE[name], SQUARE)
    assert (verdict.status, verdict.vector) == ("wrong", ((0, 0, 0),)), verdict.detail
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", REACHING_OUT)
def test_programs_reach_nothing_outside_the_sandbox(contained, name):
    verdict = judge(contained, REACHING_OUT[name], SQUARE)
    assert (verdict.status, verdict.vector) == ("wrong", ((0, 0, 0),)), verdict.detail


def test_the_sandbox_itself_works(contained):
    """What the programs above fail at is the sandbox's doing: harmless forms of the same pass."""
    harmless = (
        "import os, socket, tempfile, threading\nt = tempfile.TemporaryFile()\nt.write(b'0')\nos.getppid()\nos.listdir('/usr')\n" + RIGHT
    )
    assert judge(contained, harmless, SQUARE).status == "ok"


@pytest.mark.parametrize("code", ["while True: print('y' * 100)", "while True: pass", "import os\nos.close(1)\nwhile True: pass"])
def test_scripts_are_cut_off(verify, code):
    began = time.monotonic()
    assert judge(verify, code, [{"stdin": "", "stdout": "y"}] * 3).vector == ((0, 0, 0),)
    assert time.monotonic() - began < 10


def test_tests_that_cannot_be_reached_have_failed(verify):
    code = "def f(x):\n    while x > 2: pass\n    return x * x"
    verdict = judge(verify, code, SQUARE)
    assert verdict.vector == ((1, 0, 0),)
    assert verdict.detail == "test 2 of 3: not done in time"


def test_names_of_python_are_never_the_programs(verify):
    assert judge(verify, "def abs(x): return 0\ndef f(x): return 1", ["assert abs(f(2) - 4) < 1e-6"]).vector == ((0,),)


def test_in_the_pool():
    mode = "rlimits" if shutil.which("bwrap") is None else "bubblewrap"
    with Judge("python_tests", {"sandbox": mode, "time_s": 1.0}, workers=2) as pool:
        example = Example("a", "p", None, {"tests": SQUARE})
        programs = [RIGHT, HOSTILE["hangs"], HOSTILE["ends before the tests"], RIGHT] * 3
        assert [v.status for v in pool([fenced(code) for code in programs], [example] * 12)] == ["ok", "wrong", "wrong", "ok"] * 3


def test_the_pool_must_not_cut_the_sandbox_off():
    with pytest.raises(InputError, match=r"verifier\.timeout_s is 5 s, but python_tests takes up to verifier\.args\.time_s = 6 s"):
        Judge("python_tests", {"sandbox": "rlimits"}, timeout_s=5.0)


def test_where_the_program_is():
    assert find_program("```python\na\n```\ntext\n```py\nb\n```\n```json\n{}\n```") == "b\n"
    assert find_program("```\na\n```") == "a\n"
    assert find_program("``` python3\na\n  ```\nb\n```") == "a\n  ```\nb\n"
    for response in ("def f(): pass", "```python\nunclosed", "```js\na\n```", "```python\n\n```", ""):
        assert find_program(response) is None
    assert find_program("a = 1", "plain") == "a = 1"


def test_verdicts_without_a_sandboxed_run():
    verify = make_python_tests(sandbox="rlimits", reward="all")
    example = Example("a", "p", None, {"tests": SQUARE})
    assert (verify("no code", example).status, verify("no code", example).vector) == ("unparseable", ((0, 0, 0),))
    assert verify(fenced("def f(x): return 4"), example).reward == 0.0
    assert verify(fenced(RIGHT), example).reward == 1.0


def test_a_machine_without_bubblewrap_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"bwrap is not installed .*or ask for `sandbox: rlimits` by name"):
        make_python_tests()
    make_python_tests(sandbox="rlimits")
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    os.chmod(broken, 0o755)
    with pytest.raises(InputError, match=r"cannot be run in a sandbox here: the sandbox did not start \(no namespaces here\)"):
        make_python_tests()


@pytest.mark.parametrize(
    "metadata",
    [
        {}, {"tests": []}, {"tests": "assert 1"}, {"tests": ["assert ("]}, {"tests": [1]}, {"tests": [{"stdin": "x"}]},
        {"tests": [{"stdin": 1, "stdout": "x"}]}, {"tests": [{"call": "f", "args": 1, "expect": 1}]}, {"tests": SQUARE, "test_setup": 3},
    ],
)  # fmt: skip
def test_data_is_checked(metadata):
    check_examples([Example("a", "p", None, {"tests": SQUARE})])
    with pytest.raises(InputError, match=r'^example "b": .*\.$'):
        check_examples([Example("b", "p", None, metadata)])


@pytest.mark.parametrize("args", [{"sandbox": "none"}, {"reward": "some"}, {"time_s": 0}, {"memory_mib": True}, {"format": "tagged"}])
def test_arguments_are_checked(args):
    with pytest.raises(InputError, match=r"verifier\.args: "):
        make_python_tests(**args)
