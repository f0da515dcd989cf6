"""Promise: the objectives know torch and nothing of Megatron, Ray, vLLM or the device."""

import ast
import sys
from pathlib import Path

import megarl.objectives

ROOM = next(iter(megarl.objectives.__path__))


def sources():
    return sorted(Path(ROOM).glob("*.py"))


def test_imports():
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                root = name.split(".")[0]
                known = root == "torch" or root in sys.stdlib_module_names or name.startswith(("megarl.objectives", "megarl.errors"))
                assert known, f"{file.name} imports {name}"


def test_no_device_is_named():
    for file in sources():
        assert "cuda" not in file.read_text().lower(), file.name


def test_loss_and_prepare_have_no_loop_over_responses():
    """Python loops over tokens or responses would cost seconds per step (`batch` and `vector` take lists apart)."""
    for name in ("advantages", "aggregate", "correction", "gae", "kl", "listwise", "ratios", "rewards", "surrogates"):
        for node in ast.walk(ast.parse((next(f for f in sources() if f.stem == name)).read_text())):
            assert not isinstance(node, (ast.For, ast.ListComp, ast.GeneratorExp)), f"{name}: line {node.lineno}"
