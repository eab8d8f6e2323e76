"""Search trees on the page: actions and answers as text, with visits, values, priors and evaluations."""

import json

import pytest
from browser import Browser, chromium
from fakeruns import write_run

from forethought.envs.env import Step
from forethought.report import treeview, write_report
from forethought.search.critics import Combined, Part
from forethought.search.mcts import Budget, SearchConfig
from forethought.search.policies import LegalActions
from forethought.search.rules import PUCT
from forethought.search.search import search


class Doors:
    """Three doors in a row; the second one of the second room pays."""

    def reset(self, task=None, seed=0):
        self.way = ""
        return self._step()

    def _step(self):
        done, won = len(self.way) == 2, self.way == "bb"
        info = {"actions": ["open a", "open b"], **({"success": won} if done else {})}
        return Step(f"room <{self.way}>", float(won), terminated=done, info=info)

    def step(self, action):
        self.way += action[-1]
        return self._step()

    def snapshot(self):
        return self.way

    def restore(self, snapshot):
        self.way = snapshot

    def state_key(self):
        return self.way


@pytest.fixture(scope="module")
def found():
    critic = Combined({"hope": Part(lambda states: [0.25] * len(states))})
    config = SearchConfig(select=PUCT(c=0.5))
    return search([{"id": "doors"}], LegalActions(), Doors, critic, Budget(simulations=20), config=config).trees[0]


def test_the_columns_of_the_tree_view(found):
    tree = found.to_token_tree()
    data = treeview.tree_data(tree, lambda ids: [], 100)
    at = {text[0]: i for i, text in reversed(list(enumerate(data["text"])))}
    assert data["text"][0][0] == "room <>" and data["kind"][0] == "user" and data["visits"][0] == 20
    i = at["open b"]
    row = found.children(0)[1]
    assert data["visits"][i] == found.visits[row] and data["value"][i] == pytest.approx(found.q[row], rel=1e-3)
    assert data["prior"][i] == 0.5 and data["meta"][i] == "raw 0.250 · hope 0.250"
    assert data["kind"][at["room <b>"]] == "observation" and data["stop"][at["room <bb>"]] == "env done"
    won = next(i for i, p in enumerate(data["parent"]) if data["text"][i][0] == "open b" and data["reward"][i] == 1.0)
    assert "success 1" in data["meta"][won]


def test_with_tokens_where_there_is_an_encoding(found):
    tree = found.to_token_tree(lambda text: [ord(c) for c in text])
    data = treeview.tree_data(tree, lambda ids: [chr(i) for i in ids], 100)
    assert data["text"][0][0] == "room <>" and tree.meta[0] == {} and tree.n_tokens > 20


@pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1200, 360])
def test_in_the_browser(found, tmp_path, width):
    write_report(write_run(tmp_path, trees=[(found.to_token_tree(), {"kind": "search"})]))
    with Browser(chromium() or "") as browser:
        browser.open(tmp_path / "report.html", width=width)
        browser.run("document.querySelector('.treebox summary').click()")
        browser.run("new Promise(r=>setTimeout(r,50))")
        for _ in range(6):  # open everything, level by level
            browser.run("document.querySelectorAll('.tree button[aria-expanded=false]').forEach(b=>b.click())")
        nodes = browser.run("[...document.querySelectorAll('.node')].map(n=>n.innerText)")
        assert len(nodes) == found.to_token_tree().n_nodes
        shown = [" ".join(n.split()) for n in nodes]
        row = found.children(0)[1]
        assert any("open b" in n and f"visits {found.visits[row]}" in n and "prior 0.5" in n for n in shown)
        assert any("room <bb>" in n for n in shown)  # text of the world does not become markup
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.errors == [] and len(browser.requests) == 1
    data = json.loads((tmp_path / "report.html").read_text().split('id="tree-data-0">')[1].split("</script>")[0])
    assert data["all"] == len(nodes)
