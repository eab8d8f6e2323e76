"""Answering at one token budget: what each method picks, and that none spends more than it may."""

import math

import pytest
from test_text_world import LINES, TOKENIZER, Answer, decode, prompts, scripted

from forethought.errors import ConfigError, RewardError
from forethought.models.engine import Sampling
from forethought.models.policy import Policy
from forethought.models.tiny import tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.search.inference import METHODS, Inference, answer
from forethought.search.mcts import SearchConfig
from forethought.search.rules import UCT, FixedWidth
from forethought.search.text_world import Option, TextRollouts


@pytest.fixture(scope="module")
def engine():
    model = tiny_model(len(TOKENIZER), width=32, layers=2, heads=2, context=96, seed=1)
    return TorchEngine(Policy(model, TOKENIZER))


def share_of_a(leaves):
    return [leaf.text.count("a") / max(1, len(leaf.text)) for leaf in leaves]


def how(tokens=120, **settings):
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=3), max_depth=6)
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=3)
    return Inference(
        tokens=tokens, **({"sampling": sampling, "option": Option(sampling=LINES), "config": config} | settings)
    )


def ask(method, engine, trees, inference=None, **settings):
    settings = {"critic": share_of_a, "extract": lambda text: text[:1] or None, "decode": decode} | settings
    return answer(method, engine, trees, inference or how(), **settings)


@pytest.mark.parametrize("tokens", [30, 57, 200])
@pytest.mark.parametrize("method", METHODS)
def test_no_method_spends_more_than_the_budget(engine, method, tokens):
    trees = prompts("ab", "cd", "hh=")
    before = engine.stats.tokens_generated
    got = ask(method, engine, trees, how(tokens))
    spent = [sum(int(t.length[n]) for n in range(1, t.n_nodes)) for t in trees]
    assert [a.spent for a in got] == spent and all(0 < s <= tokens for s in spent)
    assert engine.stats.tokens_generated - before == sum(spent)
    for a in got:
        assert a.text == decode(a.tree.path_ids(a.node)[int(a.tree.length[0]) :]) and a.candidates >= 1
    if method not in ("greedy", "mcts", "beam"):
        assert all(s > tokens - 24 for s in spent)  # no further answer would fit


def test_the_same_samples_and_another_choice():
    """Answers b, aab, b, aaa: best of n takes the critic's, majority b's, the weighted vote a's."""
    texts = ["b", "aab", "b", "aaa"]
    inference = how(15, sampling=Sampling(max_tokens=4))

    def pick(method, **settings):
        (got,) = ask(method, scripted(texts), prompts("ab"), inference, **settings)
        return got.text, got.candidates

    assert pick("best-of-n") == ("aaa", 4) and pick("majority") == ("b", 4)
    assert pick("weighted") == ("aaa", 4)
    assert pick("majority", extract=lambda text: None) == ("b", 4)  # no vote counts: the first

    def down(leaves):
        return [RewardError("away") if leaf.text == "aaa" else len(leaf.text) for leaf in leaves]

    assert pick("best-of-n", critic=down) == ("aab", 4)


def test_greedy_is_greedy(engine):
    trees = prompts("ab")
    (got,) = ask("greedy", engine, trees, critic=None)
    other = prompts("ab")
    engine.extend([(other[0], 0)], 1, Sampling(max_tokens=24, temperature=0.0))
    assert got.tree.ids.tolist() == other[0].ids.tolist() and math.isnan(got.value)


def script(before, index):
    """A first step decides: only after "b" does the good answer come."""
    so_far = before.removeprefix("<bos>ab")
    options = {"": ["c\n", "b\n"], "c\n": ["c", "d"], "b\n": ["d", "aaaa"]}[so_far]
    word = options[index % 2]
    return Answer(text=word, end=len(so_far) > 0)


def later(leaves):
    """Blind to the first step, sees the end."""
    return [0.5 if not leaf.ended else leaf.text.count("a") / 4 for leaf in leaves]


@pytest.mark.parametrize("method", ["beam", "mcts"])
def test_beam_and_tree_search_find_the_good_end(method):
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=2), max_depth=3)
    (got,) = ask(method, scripted(script), prompts("ab"), how(100, config=config, beam=2, expand=2), critic=later)
    assert got.text == "b\naaaa" and got.value == 1.0 and got.complete
    assert got.candidates == 4


@pytest.mark.parametrize(("pick", "want"), [("best", "b\naaaa"), ("greedy", "b\naaaa"), ("vote", "c\nc")])
def test_answers_of_a_tree(pick, want):
    """Four finished answers, one of worth 1 and three of worth 0.4: together the three outvote it."""
    config = SearchConfig(select=UCT(c=2.0), width=FixedWidth(k=2), max_depth=3)

    def critic(leaves):
        return [0.5 if not leaf.ended else 1.0 if "a" in leaf.text else 0.4 for leaf in leaves]

    (got,) = ask("mcts", scripted(script), prompts("ab"), how(100, config=config, pick=pick), critic=critic,
                 extract=lambda text: "right" if "aaaa" in text else "wrong")  # fmt: skip
    assert got.text == want


def test_rollouts_are_part_of_the_budget(engine):
    def score(items):
        return [0.5] * len(items)

    for method in ("beam", "mcts"):
        rollouts = TextRollouts(engine, score, n=2, sampling=Sampling(max_tokens=10))
        before = engine.stats.tokens_generated
        got = ask(method, engine, prompts("ab", "cd"), how(150), critic=rollouts)
        spent = [a.spent for a in got]
        assert sum(spent) == engine.stats.tokens_generated - before and max(spent) <= 150
        assert sum(int(a.tree.length[1:].sum()) for a in got) < sum(spent)


def test_bad_input(engine):
    for method, kwargs, message in [
        ("best", {}, "method='best': give one of greedy, best-of-n"),
        ("best-of-n", {"critic": None}, "best-of-n chooses by a critic; give one"),
        ("majority", {"extract": None}, "majority counts votes by answer; give extract"),
        ("beam", {"inference": how(5)}, "tokens=5: one option of a beam may take 8"),
        ("mcts", {"inference": how(8)}, "tokens=8: a round of tree search may take 8; give more"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ask(method, engine, prompts("ab"), **kwargs)
    for settings, message in [({"tokens": 0}, "tokens=0"), ({"beam": 0}, "beam=0"), ({"pick": "x"}, "pick='x'")]:
        with pytest.raises(ConfigError, match=message):
            how(**settings)
