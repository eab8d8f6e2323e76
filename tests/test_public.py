"""The public names: one list, all there, loaded when used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import forethought


def test_the_lists_agree():
    assert sorted(forethought.__all__) == sorted(forethought._WHERE) and len(set(forethought.__all__)) == len(
        forethought.__all__
    )
    typed = {}
    for node in ast.walk(ast.parse(Path(forethought.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forethought."):
            for alias in node.names:
                typed[alias.asname] = (node.module, alias.name)
    for name, (module, attribute) in forethought._WHERE.items():
        if name in forethought._MODULES:  # a module is imported from its package
            module, attribute = module.rpartition(".")[::2]
        assert typed.pop(name) == (module, attribute)
    assert typed == {}


@pytest.mark.parametrize("name", forethought.__all__)
def test_every_public_name_is_there(name):
    module, attribute = forethought._WHERE[name]
    found = importlib.import_module(module)
    assert getattr(forethought, name) is (found if name in forethought._MODULES else getattr(found, attribute))
    assert getattr(forethought, name).__doc__


def test_no_public_name_hides_a_module():
    here = Path(forethought.__file__).parent
    modules = {p.stem for p in here.iterdir()}
    assert not modules & set(forethought.__all__)


def test_star_import_and_dir():
    names: dict = {}
    exec("from forethought import *", names)
    assert set(forethought.__all__) <= set(names) and set(forethought.__all__) <= set(dir(forethought))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = forethought.Trainer


def test_what_needs_no_torch_loads_none():
    program = (
        "import sys, forethought as f; f.TokenTree; f.Sampling; f.Env; f.Reward; f.wilson; f.load_tasks; f.RunDir; "
        "f.write_report; f.credit; f.ConfigError; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stdout + done.stderr
