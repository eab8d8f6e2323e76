"""Actions from a language model: sampled, read, counted; their tokens stand in one tree."""

import numpy as np
import pytest

from forethought.envs.env import Step
from forethought.errors import ConfigError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Sampling
from forethought.models.scripted_engine import ScriptedEngine
from forethought.models.tiny import char_tokenizer
from forethought.search.env_world import EnvRoot
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.policies import LegalActions, SampledActions
from forethought.search.rules import PUCT
from forethought.search.search import search
from forethought.tree.tree import Kind

TOKENIZER = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789:;.! ", add_bos=True)
R = ChatRenderer(TOKENIZER)


class Site:
    """Pages by letter; "go x" opens page x below this one; ends on a page that ends in "z"."""

    def reset(self, task=None, seed=0):
        self.page = ""
        return Step("home")

    def step(self, action):
        self.page += action.removeprefix("go ")
        won = self.page.endswith("z")
        return Step(f"page {self.page}", float(won), terminated=won, info={"success": won})

    def snapshot(self):
        return self.page

    def restore(self, snapshot):
        self.page = snapshot

    def state_key(self):
        return self.page


SITE = Site
SAID = ["go a"] * 9 + ["go b"] * 6 + ["go z"] * 3 + ["go c", "go d"]


def make_policy(said=SAID, **settings):
    engine = ScriptedEngine(lambda before, i: said[i % len(said)], R)

    def read(text):
        return text if text.startswith("go ") else None

    return SampledActions(
        engine,
        first=lambda state: TOKENIZER(state.observation + ":")["input_ids"],
        follow=lambda state: TOKENIZER(f" {state.observation};", add_special_tokens=False)["input_ids"],
        read=read,
        decode=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True),
        **({"n": 20, "keep": 3} | settings),
    )


def run(policy, simulations=3, **config):
    return search(
        [{"id": "t"}], policy, Site, None, Budget(simulations=simulations), config=SearchConfig(select=PUCT(), **config)
    )


def test_priors_are_shares_of_the_kept_counts():
    """ExACT check 4: 9, 6, 3, 1, 1 with b = 3 -> .5, .3333, .1667, most frequent first."""
    found = run(make_policy())
    (view,) = found.trees
    children = view.children(0)
    assert [view.text[c] for c in children] == ["go a", "go b", "go z"]
    assert view.prior[children] == pytest.approx([0.5, 1 / 3, 1 / 6])
    flat = run(make_policy(prior_temperature=5.0)).trees[0]
    assert flat.prior[1] == pytest.approx(9**0.2 / (9**0.2 + 6**0.2 + 3**0.2))


def test_each_token_is_generated_once_and_paths_are_what_was_seen():
    policy = make_policy()
    found = run(policy, simulations=5)
    tree = policy.trees["t"]
    assert found.counts["tokens"] == int(tree.length[np.array(tree.sampled)].sum())
    asked = [n for n in range(tree.n_nodes) if any(tree.sampled[c] for c in tree.children(n))]
    assert len(asked) * 20 == int(tree.sampled.sum())
    state = next(s for s in found.search.domain.states[0] if s.actions == ["go a"])
    text = TOKENIZER.decode(tree.path_ids(state.memo["leaf"]))
    assert text == "<bos>home:go a<eos> page a;"
    assert tree.kind[state.memo["leaf"]] == Kind.OBSERVATION


@pytest.mark.parametrize("leaves", [1, 3])
def test_nothing_can_be_read(leaves):
    """ExACT check 14: retried once, then one dead end; the search goes on and ends."""
    policy = make_policy(["what", "no"])
    found = run(policy, simulations=6, leaves=leaves)
    (view,) = found.trees
    assert view.text[1:] == ["(none)"] and view.ended.tolist() == [False, True] and view.prior[1] == 0.0
    assert found.counts["unread"] == 40 and view.raw[1] == 0.0 and "env_steps" not in found.counts
    assert found.counts["simulations"] == 6 and policy.trees["t"].meta[1] == {"unread": True}


def test_only_some_cannot_be_read():
    found = run(make_policy(["what", "go a", "go a", "huh"]))
    assert [found.trees[0].text[c] for c in found.trees[0].children(0)] == ["go a"]


@pytest.mark.parametrize("choose", ["sample", "random"])
def test_other_choices_depend_on_the_state_only(choose):
    policy = make_policy(choose=choose, keep=2)
    first, again = run(policy).trees[0], run(make_policy(choose=choose, keep=2)).trees[0]
    assert first.text == again.text and len(first.children(0)) == 2
    drawn = {tuple(run(make_policy(choose=choose, keep=2, sampling=Sampling(seed=s))).trees[0].text) for s in range(8)}
    assert len(drawn) > 1


def test_legal_actions_with_priors():
    policy = LegalActions(lambda s: ["go a", "go z"], prior=lambda s, actions: [1, 3])
    found = search([{"id": "t"}], policy, Site, None, Budget(simulations=9))
    view = found.trees[0]
    assert view.prior[view.children(0)].tolist() == [0.25, 0.75]
    assert view.success[view.children(0)].tolist() == [0.0, 1.0] and view.reward[view.children(0)].tolist() == [0, 1]
    bad = LegalActions(lambda s: ["go a", "go z"], prior=lambda s, actions: [1])
    with pytest.raises(ConfigError, match="prior weights"):
        search([{"id": "t"}], bad, Site, None, Budget(simulations=9))


def test_committed_actions_of_a_root():
    """A real step after another: the next search begins behind what was played."""
    root = EnvRoot(task={"id": "t"}, actions=("go a", "go b"))
    found = search([root], LegalActions(lambda s: ["go a", "go z"]), Site, None, Budget(simulations=9))
    view = found.trees[0]
    assert view.seen[0] == "page ab" and "page abz" in view.seen
    assert found.search.domain.states[0][1].actions == ["go a", "go b", "go a"]


def test_bad_settings():
    for settings, message in [
        ({"n": 0}, "n=0"),
        ({"keep": 0}, "keep=0"),
        ({"choose": "x"}, "choose='x'"),
        ({"prior_temperature": 0}, "prior_temperature=0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_policy(**settings)
