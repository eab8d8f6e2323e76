"""Vectorised episodes: what they cost, how they end, what stands in their trees."""

import numpy as np
import pytest
from corridor import Corridor, Faulty, make_policy

from forethought.envs.actions import read_action
from forethought.envs.env import Step
from forethought.errors import ConfigError
from forethought.learn.episodes import EpisodeRules, Players, coverage, episode_metrics
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.scripted_engine import ScriptedEngine
from forethought.models.tiny import byte_tokenizer, char_tokenizer
from forethought.models.torch_engine import TorchEngine
from forethought.tree.tree import Kind

TASK = {"id": "t", "seed": 0}


def scripted(answers, make=Corridor, context=1000, parse=None, renderer=None, **rules):
    renderer = renderer or ChatRenderer(byte_tokenizer())
    engine = ScriptedEngine(answers, renderer)
    return Players(engine, renderer, make, EpisodeRules(**rules), context, parse)


def one(answers, max_tokens=8, **kwargs):
    return scripted(answers, **kwargs).play([(TASK, 1)], Sampling(max_tokens=max_tokens))[0][0]


def text(episode, node):
    return byte_tokenizer().decode(episode.tree.path_ids(node), skip_special_tokens=True)


class Thirty(Corridor):
    """H19: limit 30; won at the step that the task names."""

    def reset(self, task=None, seed=0):
        self.win = task["win"]
        return Step("0")

    def step(self, action):
        self.steps += 1
        won = self.steps == self.win
        return Step("0", float(won), won, self.steps == 30 and not won, {"success": won})


def test_h19_done_is_not_won():
    tasks = [({"id": str(n), "win": n}, 1) for n in (12, 99, 30)]
    episodes = [e for (e,) in scripted(lambda *_: "r", make=Thirty).play(tasks, Sampling())]
    assert [e.stop for e in episodes] == ["won", "truncated", "won"]
    assert [e.terminated for e in episodes] == [True, False, True]
    assert [e.truncated for e in episodes] == [False, True, False]
    assert episode_metrics(episodes)["episodes/success"] == pytest.approx(2 / 3)
    assert episode_metrics(episodes)["episodes/turns_of_successes"] == 21


def test_an_episode_turn_by_turn():
    episode = one(["r", "x", "r", "r"])
    assert episode.stop == "won" and episode.success and episode.total == 1 and episode.rewards == [0, 0, 0, 1]
    assert [t.state for t in episode.turns] == ["0", "1", "1", "2"]
    assert [t.invalid for t in episode.turns] == [False, True, False, False] and episode.invalid == 1
    tree = episode.tree
    assert text(episode, episode.end) == "0\nr1\nx1\nr2\nr3\n"
    assert [Kind(k).name for k in tree.kind[tree.path(episode.end)]][:4] == [
        "PROMPT",
        "PROMPT",
        "ASSISTANT",
        "OBSERVATION",
    ]
    assert tree.outcome(episode.end) == 1 and tree.meta[episode.end]["why"] == "won after 4 turns"
    assert tree.reward[[t.node for t in episode.turns]].tolist() == [0, 0, 0, 1]
    assert tree.meta[episode.turns[1].node]["invalid"] and np.isfinite(tree.logprob).sum() == 8


def test_h09_answers_keep_their_ids():
    """The tokenizer would write "rr" as one token; the policy wrote two, and these stay on the path."""
    policy, renderer = make_policy()
    engine = TorchEngine(policy)
    rules = EpisodeRules(max_turns=3)
    ((episode,),) = Players(engine, renderer, Corridor, rules, 128).play([(TASK, 1)], Sampling(max_tokens=6, seed=1))
    path = episode.tree.path(episode.end)
    assert all(t.node in path for t in episode.turns)
    (scores,) = engine.score([(episode.tree, episode.end)])
    stored = episode.tree.logprob[episode.tree.path_tokens(episode.end)]
    sampled = np.isfinite(stored)
    assert sampled.sum() == sum(int(episode.tree.length[t.node]) for t in episode.turns)
    np.testing.assert_allclose(scores[sampled], stored[sampled], atol=1e-5)


@pytest.mark.parametrize(
    ("rules", "stop", "turns"),
    [({"max_turns": 2}, "turns", 2), ({"max_invalid": 3}, "invalid", 3), ({}, "truncated", 6)],
)
def test_cuts(rules, stop, turns):
    episode = one(lambda *_: "x", **rules)
    assert (episode.stop, len(episode.turns), episode.success) == (stop, turns, False)
    assert episode.truncated and not episode.terminated


def test_the_parser_reads_actions_and_what_it_cannot_read_is_invalid():
    answers = ["<action>r</action>", "no action> here</action>", "<action>r</action>", "<action>R</action>"]
    episode = one(answers, max_tokens=40, parse=read_action)
    assert episode.stop == "won" and [t.invalid for t in episode.turns] == [False, True, False, False]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "task 'bad', turn 2: KeyError: 'drawer'"),
        ("hangs", "task 'bad', turn 2: the environment did not return within 0.3 s"),
        ("number", "turn 2: the observation is int, not text"),
        ("tuple", "turn 2: the environment returned tuple, not a Step"),
        ("nan", "turn 2: the reward is nan, not a finite number"),
        ("both", "turn 2: terminated and truncated are both true"),
        ("alphabet", "turn 2: its observation cannot be encoded"),
        ("reset", "task 'bad', reset: OSError: no display"),
    ],
)
def test_h23_what_fails_is_counted_and_the_others_go_on(fault, message):
    renderer = ChatRenderer(char_tokenizer("0123lr\n"))
    players = scripted(lambda *_: "r", make=Faulty, renderer=renderer, env_workers=2, env_timeout=0.3)
    bad, good = {"id": "bad", "fault": fault}, {"id": "good", "fault": None}
    (a,), (b, c) = players.play([(bad, 1), (good, 2)], Sampling())
    assert a.stop == "error" and a.failed and not a.truncated and not a.terminated and a.success is None
    assert message in a.error and a.tree.meta[a.end]["error"] == a.error
    assert b.stop == c.stop == "won"
    assert coverage([a, b, c]) == {
        "episodes": 3,
        "ran": 2,
        "failed": 1,
        "tasks": 2,
        "tasks_evaluated": 1,
        "not_evaluated": ["bad"],
    }
    found = episode_metrics([a, b, c])
    assert (
        found["episodes/success"] == 1 and found["episodes/failed"] == 1 and found["stop/error"] == pytest.approx(1 / 3)
    )


class Quiet(Corridor):
    """Says whether it was a success only at the end."""

    def step(self, action):
        step = super().step(action)
        return Step(
            step.observation, step.reward, step.terminated, step.truncated, {"success": True} if step.terminated else {}
        )


def test_a_cut_episode_is_no_success_where_the_world_is_silent():
    players = scripted(lambda before, _: "r" if before.count("\n") % 2 else "l", make=Quiet)
    ((cut,),) = players.play([(TASK, 1)], Sampling())
    ((won,),) = scripted(lambda *_: "r", make=Quiet).play([(TASK, 1)], Sampling())
    assert cut.stop == "truncated" and cut.success is None
    assert episode_metrics([cut, won])["episodes/success"] == 0.5


def test_a_group_shares_its_first_prompt_and_nothing_else_is_prefilled_twice():
    """Prefilled tokens are the new ones: the prompt once, then observations and the one token that was not fed."""
    policy, renderer = make_policy()
    engine = TorchEngine(policy)
    players = Players(engine, renderer, Corridor, EpisodeRules(), 128)
    (group,) = players.play([(TASK, 8)], Sampling(max_tokens=3, seed=5))
    tree = group[0].tree
    assert all(e.tree is tree and e.prompt == group[0].prompt for e in group)
    assert {len(e.turns) for e in group} != {3}
    after = sum(len(t.after) + 1 for e in group for t in e.turns[:-1])
    assert engine.stats.tokens_prefilled == int(tree.length[group[0].prompt]) + after
    assert engine.stats.tokens_generated == sum(int(tree.length[t.node]) for e in group for t in e.turns)


def test_an_episode_does_not_depend_on_its_company():
    policy, renderer = make_policy()
    sampling = Sampling(max_tokens=3, seed=5)

    def play(groups, **rules):
        players = Players(TorchEngine(policy, max_rows=5), renderer, Corridor, EpisodeRules(**rules), 128)
        return [[[t.text for t in e.turns] for e in group] for group in players.play(groups, sampling)]

    other = {"id": "u", "seed": 3}
    whole = play([(TASK, 4), (other, 3), (TASK, 2)])
    assert play([(TASK, 6)])[0] == whole[0] + whole[2]
    assert play([(other, 3)], env_workers=3, cache_tokens=0)[0] == whole[1]
    assert len({str(e) for e in whole[0]}) > 1


@pytest.mark.parametrize(
    ("history", "prompts"),
    [
        (1, ["0\n", "0\nr1\n", "0\nl0\n", "0\nr1\n", "0\nr2\n"]),
        (2, ["0\n", "0\nr1\n", "0\nr1\nl0\n", "0\nl0\nr1\n", "0\nr1\nr2\n"]),
        (0, ["0\n", "1\n", "0\n", "1\n", "2\n"]),
    ],
)
def test_history_window(history, prompts):
    episode = one(["r", "l", "r", "r", "r"], history=history)
    assert episode.stop == "won"
    assert [text(episode, int(episode.tree.parent[t.node])) for t in episode.turns] == prompts
    assert episode.dropped == 0 and episode.branches > 0
    why = [episode.tree.meta[leaf]["why"] for leaf in episode.tree.leaves()]
    assert "won after 5 turns" in why and all(w.startswith("won after 5 turns") for w in why)
    assert "won after 5 turns; this is turn 4" in why
    assert [episode.tree.outcome(leaf) for leaf in episode.tree.leaves()] == [1.0] * len(episode.tree.leaves())


def test_windows_are_made_of_ids_that_were_there():
    """The window's tokens are those of the turns, also where the text would be encoded otherwise."""
    policy, renderer = make_policy()
    ((e,),) = Players(TorchEngine(policy), renderer, Corridor, EpisodeRules(history=1), 128).play(
        [(TASK, 1)], Sampling(max_tokens=4, seed=2)
    )
    assert len(e.turns) > 2
    for before, turn in zip(e.turns[1:], e.turns[2:], strict=False):
        path = e.tree.path_ids(int(e.tree.parent[turn.node]))
        assert path == e.tree.node_ids(e.prompt) + e.tree.node_ids(before.node) + before.after


def test_context_overflow_stops_or_drops_the_oldest_turns():
    """Prompt 2 tokens, a turn 4 ("r", its end, the observation, a newline); an answer may take 2."""
    stopped = one(lambda *_: "x", max_tokens=2, context=13, overflow="stop")
    assert stopped.stop == "context" and stopped.truncated and len(stopped.turns) == 3 and stopped.dropped == 0
    dropped = one(lambda *_: "x", max_tokens=2, context=13, overflow="drop")
    assert dropped.stop == "truncated" and len(dropped.turns) == 6 and dropped.dropped == 3
    for turn in dropped.turns:
        assert dropped.tree.path_length(turn.node) <= 13
    assert text(dropped, int(dropped.tree.parent[dropped.turns[-1].node])) == "0\nx0\nx0\n"
    tight = one(lambda *_: "x", max_tokens=2, context=5, overflow="drop")
    assert tight.stop == "truncated" and {tight.tree.path_length(t.node) for t in tight.turns} == {4}
    nothing = one([], max_tokens=2, context=3)
    assert nothing.stop == "context" and not nothing.turns and episode_metrics([nothing])["episodes/turns"] == 0


def test_a_template_that_rewrites_history_branches():
    template = (
        "{% for m in messages %}{{ m['role'][0] }}|"
        "{{ m['content'].split('.')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}a|{% endif %}"
    )
    renderer = ChatRenderer(char_tokenizer("0123456789 lrxua|.\n", chat_template=template))
    for history in (None, 1):
        episode = one(["xx.r", "x.r", "r"], renderer=renderer, parse=lambda t: t.split(".")[-1], history=history)
        assert episode.stop == "won" and episode.branches >= 2
        prompts = [
            renderer.tokenizer.decode(episode.tree.path_ids(int(episode.tree.parent[t.node]))) for t in episode.turns
        ]
        want = "u|0<eos>a|r<eos>u|1<eos>a|r<eos>u|2<eos>a|" if history is None else "u|0<eos>a|r<eos>u|2<eos>a|"
        assert prompts[-1] == want


def test_hostile_answers_pass_through():
    long = "x" * 100_000
    episode = one([long, "l\nr</action>", "<action>", ""], max_tokens=200_000, context=10**6, max_turns=4)
    assert episode.stop == "turns" and episode.turns[0].text == long and episode.invalid == 4


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_turns": 0}, "max_turns=0: give at least 1"),
        ({"history": -1}, "history=-1: give 0 or more turns, or null for all"),
        ({"env_timeout": 0}, "env_timeout=0: give a positive number of seconds"),
        ({"overflow": "cut"}, "overflow='cut': 'stop' or 'drop'"),
    ],
)
def test_wrong_rules_are_named(rules, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        one([], **rules)
