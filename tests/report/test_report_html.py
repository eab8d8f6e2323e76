"""The page of a run, read as text: numbers, escaping, limits, odd and unfinished runs."""

import base64
import hashlib
import json
import math
import random
import re

import numpy as np
import pytest
from fakeruns import ANSWERS, cell, full_run, group, metrics, results, search_tree, tokenizer, write_run
from pages import Page, leaves, resolve

from forethought.errors import RunError
from forethought.report import treeview, write_report
from forethought.report.charts import curve_chart, dot_chart, scale
from forethought.report.curves import Curve
from forethought.tree.tree import Kind, Stop, TokenTree

EVIL = '</script></style><img src=x onerror="alert(1)"><b>\'\x1b[31m\x00 \u202eback\ud800 ${x} <!-- ]]> &lt;'
NAME = '</script><img src=x onerror="alert(1)">\'/~&amp;'  # of an arm or a metric


def page(path, **kwargs) -> Page:
    return Page(write_report(path, **kwargs).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = full_run(tmp_path_factory.mktemp("run"))
    return path, page(path)


# -- numbers ---------------------------------------------------------------------------------------------------------


def check_numbers(path, found: Page) -> None:
    """Every number of the arms and the budget is on the page, exactly; nothing on the page contradicts the file."""
    data = json.loads((path / "results.json").read_text())
    placed = [(p, v) for p, v in found.values if p]
    for pointer, value in placed:
        assert resolve(data, pointer) == value, pointer
    want = leaves(data["arms"], "/arms") | leaves(data["budget"], "/budget")
    assert want and {p for p, v in placed if v is not None} == set(want)


def test_numbers_on_the_page_equal_results_json(whole):
    check_numbers(*whole)


def test_head(whole):
    text = whole[1].text
    for words in (
        "one-shot-rlvr",
        "mini",
        "SmolLM2-135M-Instruct",
        "✓ shown",
        "Rule: pool minus format only",
        "0, 1, 2",
    ):
        assert words in text
    assert "56.2% → 83.3%" in text and "95% interval 79.3% to 87.3% , n 192" in text
    assert whole[1].all("title") and "one-shot-rlvr · mini – Forethought" in text


def test_change_is_after_minus_before(whole):
    assert "+27.1 points" in whole[1].text
    values = [v for p, v in whole[1].values if p is None]
    assert any(isinstance(v, float) and math.isclose(v, 0.8333 - 0.5625) for v in values)


def test_last_values_of_the_curves_stand_in_the_legend(whole):
    path, found = whole
    last = [line["kl"] for line in metrics() if line["step"] == 29 and line["arm"] == "pool"]
    assert any(isinstance(v, float) and math.isclose(v, np.mean(last)) for _, v in found.values)


def test_sections_tables_and_names_for_screen_readers(whole):
    found = whole[1]
    assert [a["href"] for a in found.all("a") if "class" not in a] == [
        *("#results", "#curves", "#budget", "#examples", "#rollouts", "#settings")
    ]
    assert len(found.all("caption")) == len(found.all("table")) > 4
    for svg in found.all("svg", role="img"):
        title, description = svg["aria-labelledby"].split()
        assert title in found.ids and description in found.ids
    assert found.all("html", lang="en")
    for select in found.all("select"):
        assert found.all("label", **{"for": select["id"]})


# -- nothing from outside, nothing that a policy would stop ----------------------------------------------------------


def check_closed(html: str, found: Page) -> None:
    assert not re.search(r"https?:|//[a-z]", re.sub(r"<script>.*?</script>|<style>.*?</style>", "", html, flags=re.S))
    assert "url(" not in html and "@import" not in html
    for _, attrs in found.tags:
        assert "style" not in attrs and "src" not in attrs and not any(name.startswith("on") for name in attrs)


def test_the_page_is_closed_and_its_policy_allows_its_own_script_only(whole):
    html = (whole[0] / "report.html").read_text()
    check_closed(html, whole[1])
    policy = whole[1].all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    for tag in ("style", "script"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", html, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_hostile_text_stays_text_everywhere(tmp_path):
    tok = tokenizer()
    tree = TokenTree(tok.encode("<img src=x onerror=alert(1)>").ids, task=EVIL.replace("\ud800", ""))
    node = tree.add(0, tok.encode("</script><script>alert(1)</script>").ids, sampled=True, stop=Stop.ERROR)
    tree.meta[node] |= {"parts": {"<b>": 1.0}, "why": "<i>because</i>", "error": "</p><script>"}
    arms = {NAME: {NAME + "/before": cell(0.1, [0.1]), NAME + "/after": cell(0.2, [0.2]), EVIL: None}}
    data = results(
        arms=arms,
        budget={NAME: {"wall_s": 1.0, "<u>": 3}},
        claim=EVIL,
        verdict=EVIL,
        verdict_rule=EVIL,
        notes=[EVIL],
        model=EVIL,
        recipe=EVIL,
        examples=[{"prompt": EVIL, "before": EVIL, "after": EVIL, "answer": EVIL, "<k>": EVIL}],
        versions={EVIL: EVIL},
        extra={EVIL: EVIL},
    )
    lines = [{"step": 0, "arm": EVIL, "seed": EVIL, EVIL: 1.0}]
    where = {"step": 0, "arm": "<arm>", "task": tree.task, "kind": "<kind>"}
    write_run(
        tmp_path, results_=data, lines=lines, trees=[(tree, where)], tok=tok, config={"<key>": "</script><img src=x>"}
    )
    found = page(tmp_path)
    html = (tmp_path / "report.html").read_text()
    check_closed(html, found)
    check_numbers(tmp_path, found)
    assert not found.all("img") and not found.all("b", onerror="alert(1)")
    assert len(found.all("script")) == 3  # the page's own, the curves' and the tree's data
    assert not set(html) & {"\x1b", "\x00", "\u202e", "\ud800"}
    assert "␛[31m␀ [U+202E]back\ufffd" in found.text


# -- odd runs --------------------------------------------------------------------------------------------------------


def test_missing_metrics_one_seed_negative_values(tmp_path):
    arms = {
        "a": {
            "score/before": cell(-3.5, [-3.5]),
            "score/after": {"mean": -1.25, "ci95": None, "n": 1, "per_seed": [-1.25]},
        },
        "b": {"score/before": cell(None, [None]), "score/after": cell(-2.0, [-2.0], half=0.5)},
        "c": {"score/after": None, "only here": cell(0.0, [0.0])},
    }
    data = results(arms=arms, seeds=[7], verdict="reversed", budget={"a": {"wall_s": None, "env_steps": 3}, "c": {}})
    write_run(tmp_path, results_=data, lines=metrics(steps=2, arms=("a",), seeds=(7,)))
    found = page(tmp_path)
    check_numbers(tmp_path, found)
    assert "✗ reversed" in found.text and "one seed, so no band" in found.text
    assert not found.all("path", cls="band")
    assert "+2.25" in found.text  # only for the arm that has both
    assert "NaN" not in (tmp_path / "report.html").read_text() and "None" not in found.text


def test_twenty_arms_and_ten_thousand_lines_stay_small(tmp_path):
    rng = random.Random(0)
    arms = [f"arm {i}" for i in range(20)]
    names = [f"group{k % 5}/metric{k}" for k in range(30)]
    lines = [
        {"step": s, "arm": a, "seed": 0} | {n: rng.gauss(k, 1) for k, n in enumerate(names)}
        for s in range(500)
        for a in arms
    ]
    lines[5000]["group0/metric0"] = 99.0
    tok = tokenizer()
    long = group(tok, answers=["so " * 4000] * 12)
    data = results(arms={a: {"accuracy": cell(0.5, [0.5])} for a in arms}, budget={a: {"wall_s": 1} for a in arms})
    write_run(tmp_path, results_=data, lines=lines, trees=[(long, {"step": s}) for s in range(12)], tok=tok)
    found = page(tmp_path)
    check_numbers(tmp_path, found)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert len(found.all("path", cls="line")) == 600 * 2  # each curve and its key in the legend
    data = next(json.loads(s) for s in found.scripts if s.startswith('[{"0"'))
    assert max(max(means) for _, means in data[0].values()) == 99.0  # the spike is there
    assert "tokens not shown" in found.text and "8 of 12 samples" in found.text


@pytest.mark.parametrize("left", ["results.json", "metrics.jsonl", "config.yaml", "trees.sqlite"])
def test_a_run_with_one_file_only(tmp_path, left):
    full_run(tmp_path)
    for name in ("results.json", "metrics.jsonl", "config.yaml", "trees.sqlite", "tokenizer.json"):
        if name != left:
            (tmp_path / name).unlink()
    found = page(tmp_path)
    assert "What is missing" in found.text
    if left != "results.json":
        assert "results.json is missing" in found.text and "no verdict yet" in found.text
    want = {"results.json": "results", "metrics.jsonl": "curves", "config.yaml": "settings", "trees.sqlite": "rollouts"}
    assert want[left] in found.ids


def test_a_whole_run_has_nothing_missing(whole):
    assert "What is missing" not in whole[1].text


def test_examples_of_other_shapes(tmp_path):
    examples = [
        {"question": "Q" * 5000, "before": None, "after": {"x": 1}, "correct_after": "yes"},
        {"prompt": [{"role": "user", "content": "hello"}], "after": "hi", "score": 0.5},
        "text",
        {},
    ]
    found = page(write_run(tmp_path, results_=results(examples=examples)))
    assert "(3,800 characters not shown)" in found.text and "user: hello" in found.text and "score 0.5" in found.text
    assert page(write_run(tmp_path, results_=results(examples="none"))).all("section", id="examples") == []


def test_what_results_json_adds_is_shown(tmp_path):
    found = page(
        write_run(tmp_path, results_=results(coverage={"evaluated": 7, "trials": 12}, not_evaluated=["task B"]))
    )
    assert "Also in results.json" in found.text and '"trials": 12' in found.text and "task B" in found.text


def test_curves_of_results_json(tmp_path):
    given = {"heldout/accuracy": {"pool": {"step": [0, 10], "mean": [0.25, 0.5], "lo": [0.2, 0.4], "hi": [0.3, 0.6]}}}
    found = page(write_run(tmp_path, results_=results(curves=given)))
    assert "heldout/accuracy" in found.text and len(found.all("path", cls="band")) == 1
    assert (None, 0.5) in found.values


def test_an_unwritable_place_is_an_error(tmp_path, monkeypatch):
    full_run(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunError, match="report.html"):
        write_report(tmp_path)


# -- rollouts --------------------------------------------------------------------------------------------------------


def test_rollouts_show_what_was_trained_on(tmp_path):
    """H24: the reward on the page is the stored one (0.8), not the sum of its parts (2.5)."""
    tree = TokenTree([1, 2], task="t")
    for parts in ({"correct": 0.5, "style": 2.0}, {"correct": 1.0, "style": 0.0}):
        tree.add(
            0,
            [3],
            sampled=True,
            logprobs=[-0.25],
            reward=0.8,
            stop=Stop.LENGTH,
            meta={"parts": parts, "why": "because"},
        )
    found = page(write_run(tmp_path, trees=[(tree, {"step": 4, "arm": "x"})]), decode_token=lambda i: f"<{i}>")
    chips = [v for p, v in found.values if p is None]
    assert chips.count(0.8) == 3 and 2.5 not in chips  # two samples and the group's mean
    assert {0.5, 2.0, 1.0, 0.0} <= set(chips)
    assert "reward 0.800 correct 0.500 style 2" in found.text
    assert "stop length" in found.text and "why because" in found.text
    assert found.text.count("<3>") >= 2


def test_tokens_carry_place_id_logprob_and_advantage():
    tok = tokenizer()
    tree = group(tok)
    html = treeview.token_boxes(tree, 1, lambda ids: [f"t{i}" for i in ids], most=1.5, limit=400)
    boxes = re.findall(r'<span class="([^"]*)" data-v="([^"]*)">([^<]*)</span>', html)
    span = tree.span(1)
    assert len(boxes) == tree.length[1]
    for k, (classes, facts, text) in enumerate(boxes):
        place, ident, logprob, advantage = facts.split()
        at = span.start + k
        assert (int(place), int(ident), text) == (k + 1, tree.ids[at], f"t{tree.ids[at]}")
        assert float(logprob) == pytest.approx(tree.logprob[at], rel=1e-3)
        assert float(advantage) == pytest.approx(tree.advantage[at], rel=1e-3)
        steps = sum(tree.logprob[at] < s for s in (-0.1, -0.7, -1.6, -3.0))
        assert classes == f"t p2 l{steps}"  # advantage 0.5 of 1.5: the second of four


def test_colours_by_reward_where_there_is_no_advantage():
    tree = TokenTree([1])
    node = tree.add(0, [2], sampled=True, reward=-1.0)
    html = treeview.token_boxes(tree, node, lambda ids: ["x"] * len(ids), most=2.0, limit=10, reward=-1.0)
    assert html == '<span class="t n2" data-v="1 2 - 0">x</span>'


def test_a_long_sample_is_cut_in_its_middle():
    tree = TokenTree([1])
    node = tree.add(0, list(range(1000)), sampled=True)
    html = treeview.token_boxes(tree, node, lambda ids: [f"[{i}]" for i in ids], most=1, limit=40)
    assert "… 960 tokens not shown …" in html
    assert re.findall(r">\[(\d+)\]<", html) == [str(i) for i in [*range(30), *range(990, 1000)]]


def test_line_ends_empty_pieces_and_special_tokens_can_be_seen():
    tree = TokenTree([1])
    node = tree.add(0, [2, 3, 4, 5], sampled=True)
    pieces = {1: "p", 2: "\n", 3: "", 4: "<|im_end|>", 5: "\t"}
    html = treeview.token_boxes(tree, node, lambda ids: [pieces[i] for i in ids], most=1, limit=10)
    assert re.findall(r'data-v="[^"]*">(.*?)</span>', html, re.S) == [
        *('<i class="w">↵</i>\n', '<i class="w">·</i>', '<i class="w">&lt;|im_end|&gt;</i>', "\t")
    ]


def test_few_samples_are_all_shown_and_many_from_best_to_worst():
    tree = TokenTree([1])
    for k in range(100):
        tree.add(0, [k], sampled=True, reward=math.nan if k == 50 else float(k % 10))
    shown = treeview.pick_leaves(tree, 5)
    rewards = [float(tree.reward[n]) for n in shown]
    assert rewards[:4] == [9.0, 7.0, 4.0, 2.0] and math.isnan(rewards[4])
    assert treeview.pick_leaves(tree, 100) == tree.leaves()


def test_turns_of_an_episode_stand_in_order(tmp_path):
    tok = tokenizer()
    tree = TokenTree(tok.encode("start").ids, task="t")
    act = tree.add(0, tok.encode("go north").ids, sampled=True, logprobs=[-1.0] * len(tok.encode("go north").ids))
    see = tree.add(act, tok.encode("a wall").ids, kind=Kind.OBSERVATION)
    for text in ("go south", "wait"):
        tree.add(see, tok.encode(text).ids, sampled=True, reward=1.0, stop=Stop.ENV_DONE)
    found = page(write_run(tmp_path, trees=[(tree, {})], tok=tok))
    text = found.text.replace(" ", "")
    assert (
        text.index("start")
        < text.index("gonorth")
        < text.index("observationawall")
        < text.index("gosouth")
        < text.index("wait")
    )
    assert "stop env done" in found.text


def test_a_tree_of_the_prompt_alone(tmp_path):
    found = page(write_run(tmp_path, trees=[(TokenTree([1, 2, 3]), {}), (TokenTree([]), {})]))
    assert found.all("div", id="tree-0") and found.all("div", id="tree-1") and "1 2 3" in found.text


def test_tree_data_of_a_large_tree_keeps_what_was_visited_and_counts_the_rest():
    tree = TokenTree([1])
    for k in range(500):
        child = tree.add(0, [k], sampled=True, reward=k / 3)
        tree.visits[child] = 1000 if k == 499 else 0
    deep = tree.add(500, [7] * 5000, sampled=True)
    data = treeview.tree_data(tree, lambda ids: ["ab"] * len(ids), 50)
    assert data["all"] == 502 and len(data["id"]) == 50
    assert 500 in data["id"] and deep not in data["id"]  # visited first, then by order of depth
    assert data["hidden"][0] == 500 - 49 and data["hidden"][data["id"].index(500)] == 1
    assert data["reward"][data["id"].index(2)] == 0.3333 and data["reward"][0] is None
    for place, parent in enumerate(data["parent"]):
        assert parent < place and (parent >= 0) == (place > 0)
    whole = treeview.tree_data(tree, lambda ids: ["ab"] * len(ids), 1000)
    assert whole["text"][-1][1:] == [2 * 640 - 160, 5000 - 640]
    json.dumps(whole, allow_nan=False)


def test_a_deep_tree_is_no_problem(tmp_path):
    tree = TokenTree([1])
    node = 0
    for _ in range(3000):
        node = tree.add(node, [2], sampled=True)
    found = page(write_run(tmp_path, trees=[(tree, {})]))
    assert "3,001 nodes" in found.text


# -- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kwargs", "ticks"),
    [
        ([0.1, 0.9], {"fraction": True}, [0, 0.25, 0.5, 0.75, 1]),
        ([0.52, 0.87], {"fraction": True}, [0.5, 0.6, 0.7, 0.8, 0.9]),
        ([0.9, 1.03], {"fraction": True}, [0.9, 0.95, 1.0]),
        ([-3.5, 11.0], {}, [-5, 0, 5, 10, 15]),
        ([0, 29], {"whole": True, "count": 5}, [0, 10, 20]),
        ([5, 5], {"whole": True}, [5]),
        ([0.0, 0.0], {}, [-0.5, -0.25, 0, 0.25, 0.5]),
        ([], {}, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_round_ticks(values, kwargs, ticks):
    assert list(scale(values, **kwargs).ticks) == pytest.approx(ticks)


@pytest.mark.parametrize("values", [[1e308, -1e308], [5e-324, 0.0], [1e-12, 2e-12], [1e15, 1e15 + 1], [math.inf, 1.0]])
def test_scales_of_extreme_values(values):
    made = scale(values)
    assert made.lo < made.hi and len(made.ticks) >= 2
    assert all(0 <= made.at(v) <= 1 for v in values)


def test_dots_stand_where_their_values_are(tmp_path):
    arms = {"a": {"accuracy": cell(0.25, [0.25], half=0.05)}, "b": {"accuracy": cell(0.75, [0.75], half=0.05)}}
    found = page(write_run(tmp_path, results_=results(arms=arms)))
    circles = found.all("circle", cls="after")
    assert [c["cx"] for c in circles] == ["26.00%", "74.00%"]  # 2% + 96% * value on an axis from 0 to 1
    bars = found.all("line", cls="ci")
    assert [(b["x1"], b["x2"]) for b in bars] == [("21.20%", "30.80%"), ("69.20%", "78.80%")]
    assert dot_chart([], "none", ident="x").startswith("<svg")


def test_curves_stand_where_their_values_are():
    curve = Curve([0, 10, 20], [0.0, 1.0, 0.5], [None, 0.75, 0.25], [None, 1.25, 0.75], 2)
    html = curve_chart({"a": curve}, {"a": 9}, "m", ident="c", percent=False)
    # the axis goes from 0 to 1.5, from the bottom (1000) to the top (0)
    assert 'class="line" d="M10,1000L500,333L990,667"' in html
    assert 'class="band" d="M500,167L990,500L990,833L500,500Z"' in html
    assert 'class="c1 d1" data-arm="9"' in html
    assert html.count("h0") == 3  # three measured points, each marked


def test_answers_of_the_fake_run_are_on_its_page(whole):
    text = re.sub(r"\s|↵", "", whole[1].text)
    for answer in ANSWERS:
        assert re.sub(r"\s", "", answer) in text


def test_a_search_tree_shows_visits_values_and_priors():
    data = treeview.tree_data(search_tree(), lambda ids: ["x"] * len(ids), 1000)
    assert data["visits"][:3] == [81, 27, 27] and data["value"][1:4] == [0.5, 0.4, 0.3] and data["prior"][1] == 0.3333
    assert data["kind"][0] == "prompt" and data["kind"][1] == "thought" and data["value"][0] is None
