"""Search over a model's text: options, merging, critics, tokens that are generated and run once."""

import math

import numpy as np
import pytest

from forethought.errors import ConfigError, EngineError, RewardError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.policy import Policy
from forethought.models.scripted_engine import Answer, ScriptedEngine
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.search.critics import Combined, Part
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.rules import PUCT, UCT, FixedWidth, ImportanceWidth
from forethought.search.search import search
from forethought.search.text_world import Option, TextMerge, TextRollouts, has_formula
from forethought.tree.credit import search_targets
from forethought.tree.tree import Stop, TokenTree

TOKENIZER = char_tokenizer("abcdefgh =\n", add_bos=True)
R = ChatRenderer(TOKENIZER)
LINES = Sampling(max_tokens=8, stop=("\n",), seed=3)


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def prompts(*texts):
    return [TokenTree(TOKENIZER(t)["input_ids"], task=t) for t in texts]


@pytest.fixture(scope="module")
def policy():
    model = tiny_model(len(TOKENIZER), width=32, layers=2, heads=2, context=96, seed=1)
    return Policy(model, TOKENIZER)


def share_of_a(leaves):
    return [leaf.text.count("a") / max(1, len(leaf.text)) for leaf in leaves]


def scripted(answers):
    return ScriptedEngine(answers, R)


def run(engine, trees, budget, critic=share_of_a, *, width=None, config=None, **settings):
    settings.setdefault("option", Option(sampling=LINES))
    settings.setdefault("decode", decode)
    config = config or SearchConfig(select=UCT(c=1.0), width=width or FixedWidth(k=3), max_depth=5)
    budget = budget if isinstance(budget, Budget) else Budget(simulations=budget)
    return search(trees, None, engine, critic, budget, config=config, **settings)


def statistics(found, t=0):
    f = found.search.forest
    rows = [f.edge_rows(t, n) for n in range(f.size[t])]
    return [(f.visits[r], f.n[r].sum(), f.w[r].sum(), f.parent[r], f.depth[r]) for r in rows]


def test_one_option_a_simulation(policy):
    """Every simulation but a revisit adds one option, of at most 8 tokens, that its stop string or length ended."""
    engine = TorchEngine(policy)
    (tree,) = trees = prompts("ab")
    found = run(engine, trees, 30)
    new = found.search.forest.size[0] - 1
    assert new + found.counts["revisits"] == 30
    assert tree.n_nodes == 1 + new and int(tree.length[1:].sum()) == found.counts["tokens"]
    (view,) = found.trees
    for row in range(1, len(view)):
        assert 1 <= len(view.token_ids(row, int(view.parent[row]))) <= 8
        assert view.text[row] == decode(view.token_ids(row, int(view.parent[row])))
        assert view.said(row) == decode(view.token_ids(row))
    assert (np.array([len(view.children(r)) for r in range(len(view))]) <= 3).all()


def test_what_the_critic_reads_was_sampled(policy):
    """AlphaLLM check 13: path ids are prompt + option ids; decode is called on sampled ids only, encode never."""
    read, decoded = [], []

    def critic(leaves):
        read.extend((leaf.tree.path_ids(leaf.node), leaf.text) for leaf in leaves)
        return [0.5] * len(leaves)

    def watched(ids):
        decoded.append(list(ids))
        return decode(ids)

    (tree,) = trees = prompts("ab")
    run(TorchEngine(policy), trees, 12, critic, decode=watched)
    options = {tuple(tree.node_ids(n)) for n in range(1, tree.n_nodes)}
    assert {tuple(ids) for ids in decoded} <= options
    for ids, text in read:
        assert ids[:3] == tree.node_ids(0) and decode(ids[3:]) == text


@pytest.mark.parametrize("leaves", [1, 4])
def test_trees_do_not_know_each_other(policy, leaves):
    """AlphaLLM check 11 over text: node numbers, tokens and statistics, alone and among others."""
    names = ["ab", "cd", "a=b", "hh"]
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=3), max_depth=4, leaves=leaves)

    def of(which):
        trees = prompts(*which)
        found = run(TorchEngine(policy), trees, 20, config=config)
        return {n: (statistics(found, t), trees[t].ids.tolist()) for t, n in enumerate(which)}

    together = of(names)
    alone = {n: of([n])[n] for n in names}
    assert together == alone
    assert of([n for n in names if n != "cd"]) == {n: v for n, v in alone.items() if n != "cd"}


def test_several_leaves_are_different_samples(policy):
    """AlphaLLM check 12: two paths at one node get different sample indices; no node is wider than it may be."""
    (tree,) = trees = prompts("ab")
    config = SearchConfig(select=UCT(c=1.0), width=FixedWidth(k=4), leaves=4)
    found = run(TorchEngine(policy), trees, 24, config=config)
    first = [tree.node_ids(n) for n in tree.children(0)]
    assert len(first) == 4 and len({tuple(x) for x in first}) > 1
    f = found.search.forest
    assert not f.flight.any() and not f.pending.any() and (f.edges <= 4).all()


def test_each_token_is_run_once(policy):
    """AlphaLLM check 14: prefilled are the prompts, and one last token for every option that was gone on from."""
    engine = TorchEngine(policy)
    trees = prompts("abcdefgh", "hgfedcba")
    found = run(engine, trees, 25)
    used = sum(len({int(t.parent[n]) for n in range(1, t.n_nodes)} - {0}) for t in trees)
    again = engine.stats.tokens_prefilled - sum(int(t.length[0]) for t in trees) - used
    assert 0 <= again <= found.search.forest.size.sum()  # a node that is gone on from anew runs its last token again
    assert engine.stats.tokens_prefilled <= 1.1 * sum(t.n_tokens for t in trees)
    assert engine.cache is None


def test_annotated_trees_carry_the_search(policy):
    (tree,) = trees = prompts("ab")
    found = run(TorchEngine(policy), trees, 20)
    (view,) = found.trees
    targets = search_targets(tree, 0)
    children = view.children(0)
    np.testing.assert_allclose(targets.policy, view.visits[children] / view.visits[children].sum())
    assert tree.visits[0] == 20 and tree.visits[1:].sum() > 0
    np.testing.assert_allclose(tree.value[tree.children(0)], view.q[children])
    assert tree.meta[1]["search"]["raw"] == pytest.approx(view.raw[1])
    assert (tree.prior[1:] > 0).all() and (tree.prior[1:] <= 1).all()


def test_an_end_token_ends_a_path_and_is_judged_once():
    calls = []

    def critic(leaves):
        calls.extend(leaf.text for leaf in leaves)
        return [0.7 if leaf.ended else 0.1 for leaf in leaves]

    engine = scripted([Answer(text="a\n", end=False), Answer(text="b")])
    found = run(engine, prompts("ab"), 6, critic, width=FixedWidth(k=1))
    assert calls == ["a\n", "a\nb"] and found.counts["revisits"] == 4 and found.counts["evaluations"] == 2
    (view,) = found.trees
    assert view.ended.tolist() == [False, False, True] and view.visits.tolist() == [6, 6, 5]
    assert view.q[2] == pytest.approx(0.7) and view.q[1] == pytest.approx((0.1 + 5 * 0.7) / 6)


def test_finished_text_ends_a_path():
    found = run(scripted(["a=b\n"]), prompts("ab"), 3, width=FixedWidth(k=1), finished=lambda text: "=" in text)
    assert found.trees[0].ended.tolist() == [False, True] and found.counts["revisits"] == 2


def test_the_depth_limit_writes_to_the_end_in_one_piece():
    option = Option(sampling=LINES, final=Sampling(max_tokens=60))
    engine = scripted([Answer(text="a\n", end=False), "b\nc\nd\n"])
    config = SearchConfig(width=FixedWidth(k=1), max_depth=2)
    found = run(engine, prompts("ab"), 4, config=config, option=option)
    assert found.trees[0].text[1:] == ["a\n", "b\nc\nd\n"] and found.trees[0].ended[2]


def test_an_option_may_have_several_parts():
    """AlphaLLM check 10: a paragraph without a formula goes on to the next one; with one it stops at the first."""
    option = Option(sampling=Sampling(max_tokens=20, stop=("\n\n",)), ends=has_formula)
    parts = [Answer(text=t, end=False) for t in ("abc\n\n", "a = b\n\n", "c = d\n\n")]
    (tree,) = trees = prompts("ab")
    found = run(scripted(parts), trees, 2, width=FixedWidth(k=1), option=option)
    (view,) = found.trees
    assert view.text[1:] == ["abc\n\na = b\n\n", "c = d\n\n"]
    assert tree.n_nodes == 4 and tree.visits.tolist() == [2, 2, 2, 1]
    endless = scripted(lambda before, i: Answer(text="abc\n\n", end=False))
    found = run(endless, prompts("ab"), 1, width=FixedWidth(k=1), option=option)
    assert found.trees[0].text[1] == "abc\n\n" * 4


def test_token_by_token(policy):
    (tree,) = trees = prompts("ab")
    found = run(TorchEngine(policy), trees, 20, option=Option(sampling=Sampling(max_tokens=1)), merge=TextMerge())
    assert (tree.length[1:] == 1).all()
    for row in range(len(found.trees[0])):
        said = [found.trees[0].text[c] for c in found.trees[0].children(row)]
        assert len(set(said)) == len(said)


def test_the_first_option_may_be_greedy(policy):
    def first(seed):
        (tree,) = trees = prompts("ab")
        option = Option(sampling=Sampling(max_tokens=6, seed=seed, ignore_eos=True), greedy_first=True)
        run(TorchEngine(policy), trees, 3, option=option)
        return [tuple(tree.node_ids(n)) for n in tree.children(0)]

    one, two = first(1), first(2)
    assert one[0] == two[0] and one[1:] != two[1:]


# -- merging -----------------------------------------------------------------------------------------------------------


def lines(*texts):
    return scripted([Answer(text=t + "\n", end=False) for t in texts])


def test_an_equal_option_is_no_new_child():
    """AlphaLLM check 9, distances 3 and 25: the second is kept after two draws."""
    (tree,) = trees = prompts("ab")
    merge = TextMerge(distance="edit", threshold=20)
    option = Option(sampling=Sampling(max_tokens=60, stop=("\n",)))
    found = run(lines("abc", "abcdef", "g" * 25), trees, 2, width=FixedWidth(k=2), merge=merge, option=option)
    assert found.trees[0].text[1:] == ["abc\n", "g" * 25 + "\n"]
    assert found.counts["repeated"] == 1 and tree.meta[2] == {"repeats": True} and tree.visits[2] == 0
    assert found.counts["tokens"] == 4 + 7 + 26  # what was thrown away was paid for


@pytest.mark.parametrize("mode", ["strict", "compatible"])
def test_no_draw_passes(mode):
    """AlphaLLM check 9: 3, 7, 7, 2, 1 with threshold 20: strict refuses, compatible keeps index 1."""
    distances = {"c" * k + "\n": d for k, d in enumerate((3, 7, 7, 2, 1), 1)}
    merge = TextMerge(distance=lambda a, b: distances[a + "\n"], threshold=20, mode=mode)
    found = run(lines("a", *("c" * k for k in range(1, 6))), prompts("ab"), 2, width=FixedWidth(k=2), merge=merge,
                config=SearchConfig(width=FixedWidth(k=2), max_depth=1))  # fmt: skip
    if mode == "strict":
        assert found.trees[0].text[1:] == ["a\n"] and found.counts["merged"] == 1 and found.counts["revisits"] == 1
    else:
        assert found.trees[0].text[1:] == ["a\n", "cc\n"] and "merged" not in found.counts


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_critic_that_fails_is_asked_again_about_the_same_option():
    """AlphaLLM check 12: n and w as they were, the node open, and no token is sampled twice."""
    calls = []

    def critic(leaves):
        calls.append([leaf.text for leaf in leaves])
        if len(calls) == 2:
            raise RewardError("the judge is down")
        return [0.5] * len(leaves)

    found = run(lines("a", "b", "c"), prompts("ab"), 1, critic, width=FixedWidth(k=3))
    before = statistics(found)
    found.search._round(Budget(simulations=2))
    assert statistics(found) == before and found.counts["failures"] == 1
    found.run(Budget(simulations=2))
    assert calls == [["a\n"], ["b\n"], ["b\n"]] and found.counts["tokens"] == 4


def test_a_policy_that_says_nothing_fails_after_twenty_tries():
    """AlphaLLM check 17: the tree is marked failed, the other one goes on."""
    engine = scripted(lambda before, i: "" if "ab" in before else Answer(text="c\n", end=False))
    found = run(engine, prompts("ab", "cd"), 30)
    assert found.search.stopped == ["failed", ""]
    assert found.search.counts["empty"].tolist() == [20, 0]
    assert found.search.counts["simulations"].tolist() == [0, 30] and found.trees[0].visits.tolist() == [0]


def test_a_full_context_ends_a_path(policy):
    trees = prompts("a" * 90)
    found = run(TorchEngine(policy), trees, 12, width=FixedWidth(k=1))
    tree = trees[0]
    assert max(tree.path_length(n) for n in range(tree.n_nodes)) <= 96
    assert found.trees[0].ended.any() and found.counts["revisits"] > 0


def test_bad_input(policy):
    engine = TorchEngine(policy)
    for kwargs, error, message in [
        ({"trees": []}, ConfigError, "search: no roots"),
        ({"trees": prompts("ab", "ab")}, ConfigError, "two trees have the task 'ab'"),
        ({"trees": [TokenTree([], task="x")]}, EngineError, "task 'x': the path to the root is empty"),
        ({"scale": (1, 0)}, ConfigError, "scale=\\(1, 0\\)"),
        ({"tasks": [1, 2]}, ConfigError, "2 tasks for 1 roots"),
        ({"config": SearchConfig()}, ConfigError, "proposes actions one by one; give a width"),
    ]:
        with pytest.raises(error, match=message):
            run(engine, **({"trees": prompts("ab"), "budget": 3} | kwargs))
    with pytest.raises(RewardError, match="gave 3, outside its scale 0 to 1"):
        run(engine, prompts("ab"), 3, lambda leaves: [3.0] * len(leaves), scale=(0, 1))
    with pytest.raises(ConfigError, match="the engine is the policy"):
        search(prompts("ab"), lambda s: [], engine, None, Budget(nodes=1), decode=decode)
    with pytest.raises(ConfigError, match="parts=0"):
        Option(parts=0)


# -- several critics, rollouts -----------------------------------------------------------------------------------------


def test_parts_are_kept_and_steer_the_width(policy):
    """Importance reads the value part alone; the combined score is what goes up."""
    critic = Combined(
        {
            "value": Part(lambda leaves: [0.0 if leaf.node == leaf.root else 8.5 for leaf in leaves]),
            "orm": Part(lambda leaves: [[1, 0, 1, 1]] * len(leaves)),
        }
    )
    width = ImportanceWidth(column="value", least=2, root_least=3, root_most=7)
    config = SearchConfig(select=UCT(c=100.0), width=width, max_depth=1)
    found = run(TorchEngine(policy), prompts("ab"), 20, critic, config=config, value_roots=True)
    (view,) = found.trees
    assert len(view.children(0)) == 7  # floor(8.5) + 1 = 9, at most 7
    assert view.parts["value"][1:].tolist() == [8.5] * 7 and view.raw[1:] == pytest.approx([9.25] * 7)
    config = SearchConfig(select=UCT(c=100.0), width=ImportanceWidth(root_least=3, column="orm"), max_depth=1)
    found = run(TorchEngine(policy), prompts("ab"), 20, critic, config=config, value_roots=True)
    assert len(found.trees[0].children(0)) == 3


def test_rollouts_are_paid_for_and_stand_apart(policy):
    """AlphaLLM: four answers a prefix, mean score; ended prefixes are scored themselves."""
    scored = []

    def score(items):
        scored.extend((tree, node) for tree, node, _ in items)
        return [float(tree.path_length(node)) for tree, node, _ in items]

    engine = TorchEngine(policy)
    rollouts = TextRollouts(engine, score, n=4, sampling=Sampling(max_tokens=5))
    (tree,) = trees = prompts("ab")
    found = run(engine, trees, 10, rollouts, width=FixedWidth(k=2))
    (view,) = found.trees
    own = sum(int(tree.length[n]) for n in range(1, tree.n_nodes))
    assert found.counts["rollout_tokens"] > 0 and found.counts["tokens"] == own + found.counts["rollout_tokens"]
    side = rollouts.trees["ab"]
    open_rows = [r for r in range(1, len(view)) if not view.ended[r]]
    assert len(scored) == 4 * len(open_rows) + (len(view) - 1 - len(open_rows))
    for row in open_rows:
        place = next(n for n in range(side.n_nodes) if side.path_ids(n) == tree.path_ids(int(view.tokens[1][row])))
        kids = [c for c in side.children(place) if side.sampled[c]]
        assert view.raw[row] == pytest.approx(np.mean([side.path_length(c) for c in kids[:4]]))
    assert all(t is side for t, _ in scored)


def test_a_budget_of_tokens(policy):
    found = run(TorchEngine(policy), prompts("ab", "cd"), Budget(tokens=50))
    spent = found.search.counts["tokens"]
    assert ((spent >= 50) & (spent < 58)).all()


def test_priors_are_mean_token_probabilities(policy):
    (tree,) = trees = prompts("ab")
    found = run(TorchEngine(policy), trees, 5, config=SearchConfig(select=PUCT(), width=FixedWidth(k=5)))
    node = int(found.trees[0].tokens[1][1])
    assert tree.prior[node] == pytest.approx(math.exp(tree.logprob[tree.span(node)].mean()), rel=1e-6)
    assert Stop(int(tree.stop[node])) in (Stop.EOS, Stop.STRING, Stop.LENGTH)
