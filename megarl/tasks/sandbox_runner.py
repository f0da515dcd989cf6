"""What runs inside a sandbox. Its text is handed to a bare Python there, so it uses the standard library only and imports nothing of ours.

Three roles, by the settings in argv[1]: `script` runs a program as __main__ on its standard input; `serve` runs a program and then answers
calls of its functions; `check` runs tests, whose calls of the program's functions go to the `serve` process. Tests and program never share
an interpreter: what a program can do to the checker is return values and raise, as plain data. The two talk over the socket `channel`,
in frames of a 4-byte length and JSON.
"""

import ast
import builtins
import collections
import itertools
import json
import math
import os
import resource
import socket
import struct
import sys
import types

HELLO = b"\0\0\0\0"
"""Sent before the program's first line runs: a sandbox that did not start is not the program's fault."""
NOT_STARTED = 3
LARGEST_FRAME = 1 << 24
MOST_ITEMS = 1_000_000


def limit(settings):
    """Drop privileges and set the limits; they also keep the process from getting children or threads."""
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def read_all(descriptor):
    with open(descriptor, encoding="utf-8", newline="") as file:
        return file.read()


# ------------------------------------------------------------------ plain data
def encode(value):
    """Plain data as JSON can hold it, with the types that Python tells apart. Iterators become lists, subclasses their plain kind."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item) for item in value]]
    iterators = (list, range, collections.deque, types.GeneratorType, map, filter, zip, enumerate, reversed)
    if isinstance(value, iterators) or hasattr(value, "__next__") or type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        return ["list", [encode(item) for item in itertools.islice(value, MOST_ITEMS)]]
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(value):
    """The opposite of `encode`. Trusts nothing: what is not of its form raises."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind, *content = value
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content[0])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content[0]}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content[0])


def send(channel, message):
    data = json.dumps(message).encode()
    try:
        channel.sendall(struct.pack("<I", len(data)) + data)
    except OSError:
        raise EOFError("the program has ended") from None


def receive(channel):
    """The next frame; EOFError when the other side is gone."""
    size = struct.unpack("<I", exactly(channel, 4))[0]
    if size > LARGEST_FRAME:
        raise ValueError("a value of too many bytes")
    return json.loads(exactly(channel, size))


def exactly(channel, size):
    parts = []
    while size:
        try:
            part = channel.recv(min(size, 1 << 16))
        except OSError:  # reset: it ended without reading everything
            part = b""
        if not part:
            raise EOFError("the program has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# ------------------------------------------------------------------- program
def run_script(settings):
    source = read_all(settings["source"])
    limit(settings)
    with socket.socket(fileno=settings["channel"]) as channel:
        channel.sendall(HELLO)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), module.__dict__)


def serve(settings):
    source = read_all(settings["source"])
    channel = socket.socket(fileno=settings["channel"])
    limit(settings)
    channel.sendall(HELLO)
    namespace = {"__name__": "program"}
    failure = None
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except BaseException as error:
        failure = error
    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        try:
            if failure is not None:
                raise failure
            function = eval(request["function"], namespace)
            answer = {"value": encode(function(*decode(request["args"]), **decode(request["kwargs"])))}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": str(error)[:500]}
        send(channel, answer)


# --------------------------------------------------------------------- tests
def proxy(channel, function):
    """A function that calls `function` of the program."""

    def call(*args, **kwargs):
        send(channel, {"function": function, "args": encode(args), "kwargs": encode(kwargs)})
        answer = receive(channel)
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (AssertionError, UnicodeError))
            raise (kind if known else RuntimeError)(answer["text"] if known else f"{answer['raised']}: {answer['text']}")
        return decode(answer["value"])

    return call


def free_names(code):
    """Names that a test uses and neither it nor Python defines: they are the program's functions."""
    used, defined = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined


def equal(value, expected):
    """Whether a returned value is the expected JSON value: tuples are lists, and floats may differ by rounding."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value = {str(key): item for key, item in value.items()}
        return value.keys() == expected.keys() and all(equal(value[key], expected[key]) for key in value)
    if isinstance(value, float) and isinstance(expected, (int, float)) and not isinstance(expected, bool):
        return value == expected or math.isclose(value, expected, rel_tol=1e-9)
    return type(value) is type(expected) and value == expected


def check(settings):
    """One line for each test: `true`, or JSON text that says why not."""
    task = json.loads(read_all(settings["source"]))
    channel = socket.socket(fileno=settings["channel"])
    limit(settings)
    try:
        exactly(channel, len(HELLO))
    except EOFError:
        sys.exit(NOT_STARTED)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
    for test in task["tests"]:
        result = True
        try:
            if isinstance(test, str):
                code = task["setup"] + "\n" + test
                exec(compile(code, "test", "exec"), {name: proxy(channel, name) for name in free_names(code)} | {"__name__": "test"})
            else:
                value = proxy(channel, test["call"])(*test["args"], **test.get("kwargs", {}))
                if not equal(value, test["expect"]):
                    result = f"got {value!r}"[:200]
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    SETTINGS = json.loads(sys.argv[1])
    {"script": run_script, "serve": serve, "check": check}[SETTINGS["role"]](SETTINGS)
