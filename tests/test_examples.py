"""The examples do what they say."""

import ast
import importlib.util
from pathlib import Path

import pytest

import forethought

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_examples_use_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forethought"):
            assert node.module == "forethought" and {a.name for a in node.names} <= set(forethought.__all__)
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("forethought.") for a in node.names)


def test_the_loop_is_short():
    assert len((EXAMPLES / "grpo_loop.py").read_text().splitlines()) < 100


@pytest.mark.slow
def test_the_loop_learns_to_add(capsys):
    """Known optimum 1; guessing gives 0.1."""
    curve = load(EXAMPLES / "grpo_loop.py").train()
    assert sum(curve[:5]) / 5 < 0.2
    assert sum(curve[-20:]) / 20 > 0.9
    said = capsys.readouterr().out
    assert said.startswith("step   0  reward 0.0") and f"step 399  reward {curve[-1]:.2f}" in said
