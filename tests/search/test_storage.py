"""Saved searches: go on as if unbroken, over environments and over text; damaged files are named."""

import json

import numpy as np
import pytest
from test_policies import SITE, make_policy
from test_text_world import LINES, TOKENIZER, decode, prompts, scripted, share_of_a
from worlds import Heap, NoSnapshots, Ring

from forethought.errors import ConfigError, DataError, EnvError
from forethought.models.policy import Policy
from forethought.models.tiny import tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.search.critics import Rollouts
from forethought.search.env_world import EnvRoot
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.policies import LegalActions
from forethought.search.rules import PUCT, UCT, FixedWidth, Noise, SoftBackup
from forethought.search.search import load, search
from forethought.search.text_world import Option, TextMerge

ROOTS = [EnvRoot(task={"heap": h}, name=f"heap {h}") for h in (7, 9)]


def equal(a, b):
    x, y = a.search.forest.to_arrays(), b.search.forest.to_arrays()
    assert x.keys() == y.keys()
    for name in x:
        np.testing.assert_array_equal(x[name][..., : y[name].shape[-1]], y[name][..., : x[name].shape[-1]], name)
    counts = [{k: v for k, v in c.counts.items() if k != "replayed_steps"} for c in (a, b)]
    assert counts[0] == counts[1] and a.search.stopped == b.search.stopped


@pytest.mark.parametrize("env", [Heap, NoSnapshots])
@pytest.mark.parametrize("merge", ["none", "share"])
def test_an_environment_search_goes_on_after_saving(tmp_path, env, merge):
    config = SearchConfig(select=PUCT(c=1.0), backup=SoftBackup(temperature=0.2), noise=Noise(), seed=4)

    def begin(simulations):
        return search(
            ROOTS, LegalActions(), env, Rollouts(), Budget(simulations=simulations), config=config, merge=merge
        )

    part = begin(30)
    part.save(tmp_path / "tree.npz")
    again = load(tmp_path / "tree.npz", LegalActions(), env, Rollouts(), roots=ROOTS, merge=merge)
    assert again.search.config == config
    equal(again, part)
    whole = begin(80)
    again.run(Budget(simulations=80))
    equal(again, whole)
    for a, b in zip(again.trees, whole.trees, strict=True):
        assert a.text == b.text and a.seen == b.seen


def test_a_text_search_goes_on_after_saving(tmp_path):
    policy = Policy(tiny_model(len(TOKENIZER), width=32, layers=2, heads=2, context=96, seed=1), TOKENIZER)
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=3), max_depth=5)
    settings = {"option": Option(sampling=LINES), "decode": decode, "merge": TextMerge()}

    def begin(simulations):
        budget = Budget(simulations=simulations)
        return search(prompts("ab", "cd"), None, TorchEngine(policy), share_of_a, budget, config=config, **settings)

    begin(12).save(tmp_path / "tree.npz")
    again = load(tmp_path / "tree.npz", None, TorchEngine(policy), share_of_a, **settings)
    again.run(Budget(simulations=30))
    whole = begin(30)
    equal(again, whole)
    for a, b in zip(again.trees, whole.trees, strict=True):
        assert a.text == b.text and a.tokens[0].ids.tolist() == b.tokens[0].ids.tolist()
        np.testing.assert_array_equal(a.tokens[0].visits, b.tokens[0].visits)


def test_sampled_policies_keep_their_tokens(tmp_path):
    budget = Budget(simulations=4)
    first = search([{"id": "t"}], make_policy(), SITE, None, budget, config=SearchConfig(select=PUCT()))
    first.save(tmp_path / "tree.npz")
    policy = make_policy()
    again = load(tmp_path / "tree.npz", policy, SITE, None, roots=[{"id": "t"}])
    assert policy.trees["t"].ids.tolist() == first.search.domain.policy.trees["t"].ids.tolist()
    again.run(Budget(simulations=9))
    whole = search([{"id": "t"}], make_policy(), SITE, None, Budget(simulations=9), config=SearchConfig(select=PUCT()))
    equal(again, whole)
    assert policy.trees["t"].ids.tolist() == whole.search.domain.policy.trees["t"].ids.tolist()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "tree.npz"
    search(ROOTS, LegalActions(), Heap, Rollouts(), Budget(simulations=30)).save(path)
    return path


def reload(path, roots=ROOTS, env=Heap):
    return load(path, LegalActions(), env, Rollouts(), roots=roots)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_file_is_named(saved, share):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match="tree.npz: the search tree file is damaged .*; search again or use a copy"):
        reload(saved)


def test_any_changed_byte_is_noticed_or_harmless(saved):
    """Never another exception, never another tree."""
    data = saved.read_bytes()
    good = reload(saved).search.forest.to_arrays()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(len(data), size=40):
        saved.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            got = reload(saved).search.forest.to_arrays()
        except DataError:
            refused += 1
            continue
        for name, array in got.items():
            np.testing.assert_array_equal(array, good[name])
    assert refused > 20


def test_other_files_are_named(saved, tmp_path):
    saved.write_bytes(b"hello")
    with pytest.raises(DataError, match="damaged"):
        reload(saved)
    np.savez(saved, x=np.zeros(3))
    with pytest.raises(DataError, match="damaged"):
        reload(saved)
    np.savez(saved, header=np.frombuffer(b"[1]", np.uint8))
    with pytest.raises(DataError, match="holds no search"):
        reload(saved)
    np.savez(saved, header=np.frombuffer(json.dumps({"schema": 9}).encode(), np.uint8))
    with pytest.raises(DataError, match="has version 9, this package reads 1; update the package"):
        reload(saved)
    np.savez(saved, header=np.frombuffer(json.dumps({"schema": 1}).encode(), np.uint8))
    with pytest.raises(DataError, match="no whole search tree file .KeyError"):
        reload(saved)
    with pytest.raises(DataError, match="none.npz: cannot be read: No such file"):
        reload(tmp_path / "none.npz")


def test_other_helpers_are_named(saved):
    with pytest.raises(DataError, match=r"holds the trees \['heap 7', 'heap 9'\].*give the roots"):
        reload(saved, roots=ROOTS[:1])
    with pytest.raises(EnvError, match="replayed, reset gave"):
        reload(saved, env=Ring)
    with pytest.raises(ConfigError, match="cannot be saved"):
        from games import HashGame

        search([], None, HashGame([1]), None, Budget(simulations=3)).save(saved)


def test_a_text_file_needs_no_roots(tmp_path):
    engine = scripted(lambda before, i: "abc"[i % 3] + "\n")
    config = SearchConfig(width=FixedWidth(k=2))
    first = search(prompts("ab"), None, engine, None, Budget(nodes=4), config=config, decode=decode)
    first.save(tmp_path / "t.npz")
    again = load(tmp_path / "t.npz", None, engine, None, decode=decode)
    assert again.trees[0].text == first.trees[0].text and again.trees[0].name == "ab"
