"""The one direction of imports, and what must stay light: cli -> recipes -> evaluate, report -> search, learn ->
envs, rewards -> models -> tree. A layer imports only what stands to the right of it; base modules import no layer.

Parts that stand side by side do not know each other, with one exception: an environment may judge with a reward, never
the other way round."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forethought

ROOT = Path(forethought.__file__).parent
LAYERS = [
    ("cli", "__main__", "forethought"),
    ("recipes",),
    ("evaluate", "report"),
    ("search", "learn"),
    ("envs", "rewards"),
    ("models",),
    ("tree",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIDE_BY_SIDE = {("envs", "rewards"), ("__main__", "cli")}
BASE = len(LAYERS)  # the modules at the top of the package
HEAVY = {"torch", "transformers", "sympy", "accelerate", "peft", "math_verify", "tokenizers", "safetensors"}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# Whoever imports one of these must not have to wait for torch.
LIGHT = ["__init__.py", "cli.py", "envs/env.py", "rewards/reward.py", "evaluate/stats.py", "models/engine.py"]
LIGHT += ["tree/tree.py", "tree/store.py", "recipes/__init__.py"]


def layer(module: str) -> tuple[str, int]:
    """(name of the part, rank) of a dotted module inside the package: "learn.losses" -> ("learn", 3)."""
    top = module.split(".")[0] or "forethought"
    return top, RANK.get(top, BASE)


def own_layer(path: Path) -> tuple[str, int]:
    parts = path.with_suffix("").parts
    return layer("" if parts == ("__init__",) else ".".join(parts))


def imports(source: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module inside the package, or "!" and a foreign top-level name; line; at module level) of all imports.

    Also `importlib.import_module("forethought...")` with a literal name.
    """
    package = ("forethought", *path.parent.parts)

    def inside(name: str, line: int, top: bool) -> tuple[str, int, bool]:
        first, _, rest = name.partition(".")
        return (rest, line, top) if first == "forethought" else ("!" + first, line, top)

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield inside(alias.name, child.lineno, top)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = ".".join([*package[: len(package) - child.level + 1], *([base] if base else [])])
                if base == "forethought":  # from forethought import learn
                    for alias in child.names:
                        if alias.name in RANK or (ROOT / f"{alias.name}.py").is_file():
                            yield alias.name, child.lineno, top
                else:
                    yield inside(base, child.lineno, top)
            elif isinstance(child, ast.Call) and "import_module" in ast.unparse(child.func):
                for arg in child.args[:1]:
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                        yield inside(arg.value, child.lineno, top)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            deeper = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only
            yield from visit(child, top and not deeper)

    yield from visit(ast.parse(source), True)


def broken_rules(source: str, path: Path) -> list[str]:
    part, rank = own_layer(path)
    out = []
    for module, line, top in imports(source, path):
        where = f"{path}:{line}"
        if module.startswith("!"):
            if rank == BASE and top and module[1:] in HEAVY:
                out.append(f"{where}: a base module imports {module[1:]} at module level")
            continue
        other, other_rank = layer(module)
        if rank == BASE and other_rank != BASE:
            out.append(f"{where}: a base module imports the layer {other}")
        elif other != part and other_rank <= rank and rank != BASE and (part, other) not in SIDE_BY_SIDE:
            out.append(f"{where}: {part} imports {other}, which does not stand to the right of it")
    return out


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_one_way(path):
    assert broken_rules((ROOT / path).read_text(), path) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("tree/x.py", "import forethought.models.engine", "tree/x.py:1: tree imports models"),
        ("learn/x.py", "from forethought import search", "learn imports search"),
        ("learn/x.py", "def f():\n  from forethought.search.mcts import x", "learn/x.py:2: learn imports search"),
        ("models/a/x.py", "from ...learn import losses", "models imports learn"),
        ("models/x.py", "from ..learn.losses import y", "models imports learn"),
        ("envs/x.py", "import importlib\nimportlib.import_module('forethought.recipes.a')", "envs imports recipes"),
        ("search/x.py", "if TYPE_CHECKING:\n    from forethought.recipes import r", "search imports recipes"),
        ("config.py", "from forethought.tree.tree import TokenTree", "a base module imports the layer tree"),
        ("data.py", "try:\n    import torch\nexcept ImportError: pass", "a base module imports torch at module level"),
        ("rundir.py", "class A:\n    import transformers.models", "imports transformers at module level"),
        ("report/x.py", "from forethought import cli", "report imports cli"),
        ("rewards/x.py", "from forethought.envs.env import Env", "rewards imports envs"),
        ("evaluate/x.py", "import forethought.report.page", "evaluate imports report"),
        ("cli.py", "import forethought.__main__", "cli imports __main__"),
        ("envs/x.py", "from forethought.rewards.reward import Reward", ""),
        ("cli.py", "from forethought.recipes import r\nfrom forethought import config", ""),
        ("learn/x.py", "from forethought.learn import y\nfrom . import z\nfrom ..tree.tree import t", ""),
        ("data.py", "def f():\n    import torch\nimport numpy\nfrom forethought import errors, __version__", ""),
        ("models/x.py", "import torch\nfrom forethought.errors import ModelError", ""),
    ],
)
def test_the_rule_itself(path, source, expected):
    found = broken_rules(source, Path(path))
    assert (expected in found[0] and len(found) == 1) if expected else found == []


def is_light(path: Path) -> bool:
    return own_layer(path)[1] == BASE or str(path) in LIGHT or path.parts[0] == "report"


@pytest.mark.parametrize("path", [p for p in MODULES if is_light(p)], ids=str)
def test_light_modules_load_nothing_heavy(path):
    parts = path.with_suffix("").parts
    name = ".".join(["forethought", *(parts[:-1] if parts[-1] == "__init__" else parts)])
    program = f"import sys, {name}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_file_is_a_wall(path):
    assert len((ROOT / path).read_text().splitlines()) <= 600
