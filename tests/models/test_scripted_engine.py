"""The scripted engine: answers in order, log-probs as given, cuts as a sampler would make them."""

import math

import numpy as np
import pytest

from forethought.errors import ConfigError, EngineError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.scripted_engine import Answer, ScriptedEngine
from forethought.models.tiny import char_tokenizer
from forethought.tree.tree import Kind, Stop

R = ChatRenderer(char_tokenizer("abcdefgh \n"))
END = 2


def start(text="ab"):
    return R.start(text)


def texts(tree, nodes):
    return [R.text(tree.node_ids(n)) for n in nodes]


def test_answers_come_in_order_leaf_by_leaf():
    engine = ScriptedEngine(["a", "b", "c", "d", "e"], R)
    one, two = start(), start("c")
    got = engine.extend([one, two], 2, Sampling())
    assert [texts(t, nodes) for (t, _), nodes in zip((one, two), got, strict=True)] == [["a", "b"], ["c", "d"]]
    tree = one[0]
    node = got[0][0]
    assert tree.node_ids(node) == [*R.encode("a"), END]
    assert (tree.kind[node], tree.sampled[node], tree.stop[node]) == (Kind.ASSISTANT, True, Stop.EOS)
    assert tree.logprob[tree.span(node)].tolist() == [-1.0, -1.0]
    assert (engine.stats.requests, engine.stats.tokens_generated) == (4, 8)
    assert engine.trainable


def test_a_used_up_list_is_said_before_any_tree_changes():
    engine = ScriptedEngine(["a", "b", "c"], R)
    tree, leaf = start()
    engine.extend([(tree, leaf)], 2, Sampling())
    with pytest.raises(EngineError, match="2 answers asked for, 1 of 3 scripted ones are left"):
        engine.extend([(tree, leaf)], 2, Sampling())
    assert tree.n_nodes == 3
    assert texts(tree, engine.extend([(tree, leaf)], 1, Sampling())[0]) == ["c"]


def test_a_function_sees_the_text_and_the_index():
    seen = []

    def script(text, index):
        seen.append((text, index))
        return "abc"[index]

    engine = ScriptedEngine(script, R)
    tree, leaf = start("cd")
    (nodes,) = engine.extend([(tree, leaf)], 2, Sampling())
    engine.extend([(tree, leaf)], 1, Sampling())
    engine.extend([(tree, nodes[0])], 1, Sampling())
    assert seen == [("cd", 0), ("cd", 1), ("cd", 2), ("cda<eos>", 0)]
    assert texts(tree, tree.children(leaf)) == ["a", "b", "c"]


def test_given_logprobs_are_stored_and_scored_again():
    engine = ScriptedEngine([Answer(text="ab", logprobs=(-0.5, -0.25, -2.0)), "c"], R, logprob=-3.0)
    tree, leaf = start("ab")
    ((node, other),) = engine.extend([(tree, leaf)], 2, Sampling())
    assert tree.logprob[tree.span(node)].tolist() == [-0.5, -0.25, -2.0]
    first, second = engine.score([(tree, node), (tree, other)])
    assert math.isnan(first[0]) and first[1:].tolist() == [-3.0, -0.5, -0.25, -2.0]
    assert second[1:].tolist() == [-3.0, -3.0, -3.0]
    assert engine.stats.tokens_scored == 7
    assert np.isnan(tree.logprob[0])  # scoring stores nothing


@pytest.mark.parametrize("logprobs", [(-1.0,), (-1.0,) * 4])
def test_another_number_of_logprobs(logprobs):
    tree, leaf = start()
    engine = ScriptedEngine(["a", Answer(text="ab", logprobs=logprobs)], R)
    with pytest.raises(EngineError, match=f"the answer 'ab' has 3 tokens but {len(logprobs)} log-probs"):
        engine.extend([(tree, leaf)], 2, Sampling())
    assert tree.n_nodes == 1


@pytest.mark.parametrize(
    ("answer", "sampling", "text", "stop", "ended"),
    [
        ("abcd", Sampling(max_tokens=5), "abcd", Stop.EOS, True),
        ("abcd", Sampling(max_tokens=4), "abcd", Stop.LENGTH, False),
        ("abcd", Sampling(max_tokens=2), "ab", Stop.LENGTH, False),
        ("abcd", Sampling(stop=("cd", "b")), "ab", Stop.STRING, False),
        ("abcd", Sampling(stop=("xy",)), "abcd", Stop.EOS, True),
        (Answer(text="ab", end=False), Sampling(), "ab", Stop.LENGTH, False),
        (Answer(text="abcd", logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0)), Sampling(stop=("b",)), "ab", Stop.STRING, False),
    ],
)
def test_cuts(answer, sampling, text, stop, ended):
    tree, leaf = start()
    ((node,),) = ScriptedEngine([answer], R).extend([(tree, leaf)], 1, sampling)
    ids = tree.node_ids(node)
    assert ids == R.encode(text) + ([END] if ended else [])
    assert tree.stop[node] == stop
    if isinstance(answer, Answer) and answer.logprobs:
        assert tree.logprob[tree.span(node)].tolist() == [-1.0, -2.0]


def test_a_conversation_by_script():
    renderer = ChatRenderer(
        char_tokenizer("abcdefgh \n", specials=["<u>", "<m>", "<end>"]),
        template="{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<m>' }}"
        "{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<m>{% endif %}",
    )
    engine = ScriptedEngine(["b", "d"], renderer)
    tree, node = renderer.start([{"role": "user", "content": "a"}])
    for follow in ("c", None):
        ((node,),) = engine.extend([(tree, node)], 1, Sampling())
        if follow:
            node = renderer.extend_turn(tree, node, follow)
    assert renderer.tokenizer.decode(tree.path_ids(node)) == "<u>a<end><m>b<end><u>c<end><m>d<end>"


def test_progress_and_loads():
    engine = ScriptedEngine(["a", "b"], R)
    seen = []
    engine.extend([start()], 2, Sampling(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 2)]
    engine.load_weights({})
    assert engine.loads == 1


def test_bad_arguments():
    with pytest.raises(EngineError, match="n=0"):
        ScriptedEngine(["a"], R).extend([start()], 0, Sampling())
    for value in (0.5, math.nan):
        with pytest.raises(ConfigError, match=f"logprob={value}: a log-prob is 0 or less"):
            ScriptedEngine([], R, logprob=value)


def test_a_leaf_that_stands_twice_in_a_call_gets_further_samples():
    leaf = start()
    engine = ScriptedEngine(lambda before, i: "abcd"[i], R)
    got = engine.extend([leaf, leaf], 2, Sampling())
    assert [texts(leaf[0], nodes) for nodes in got] == [["a", "b"], ["c", "d"]]
