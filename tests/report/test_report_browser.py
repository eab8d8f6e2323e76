"""The page in a real browser: no error, nothing asked from outside, every control works, nothing is too wide."""

import json

import pytest
from browser import Browser, chromium
from fakeruns import ARMS, cell, full_run, group, metrics, results, search_tree, tokenizer, write_run
from pages import leaves, resolve
from test_report_html import EVIL

from forethought.report import write_report
from forethought.tree.tree import TokenTree

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with Browser(chromium() or "") as it:
        yield it


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = full_run(tmp_path_factory.mktemp("run"))
    write_report(path)
    return path


def choose(browser, select, value):
    browser.run(
        f"(()=>{{const s=document.getElementById('{select}');s.value='{value}';"
        "s.dispatchEvent(new Event('change'))})()"
    )


def options(browser, select):
    return browser.run(f"[...document.querySelectorAll('#{select} option')].map(o=>[o.value,o.textContent])")


def shown(browser, query):
    """Ids of the matching elements that take up room."""
    return browser.run(f"[...document.querySelectorAll('{query}')].filter(e=>e.offsetHeight>0).map(e=>e.id)")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (768, False), (360, False), (360, True)])
def test_no_error_no_request_no_sideways_scroll(browser, run, width, dark):
    browser.open(run / "report.html", width=width, dark=dark)
    assert browser.run("document.documentElement.dataset.ready") == "1"
    browser.run("document.querySelectorAll('details').forEach(d=>d.open=true)")
    for select in ("pick-view", "pick-curve", "pick-tree"):
        for value, _ in options(browser, select):
            choose(browser, select, value)
            assert browser.run("document.documentElement.scrollWidth") <= width, (select, value)
    assert browser.errors == []
    assert browser.requests == [(run / "report.html").resolve().as_uri()]
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 18, 23)" if dark else "rgb(252, 252, 253)")


def test_numbers_in_the_browser_equal_results_json(browser, run):
    browser.open(run / "report.html")
    data = json.loads((run / "results.json").read_text())
    found = browser.run("[...document.querySelectorAll('[data-path]')].map(e=>[e.dataset.path,e.dataset.value])")
    for pointer, value in found:
        assert resolve(data, pointer) == json.loads(value)
    want = leaves(data["arms"], "/arms") | leaves(data["budget"], "/budget")
    assert {p for p, _ in found} == set(want)
    visible = "[...document.querySelectorAll('#view-0 td.mean .num')].map(e=>e.textContent)"
    assert browser.run(visible) == ["56.2%", "83.3%", "56.2%", "72.9%", "56.2%", "57.8%"]


def test_one_metric_at_a_time(browser, run):
    browser.open(run / "report.html")
    assert [t for _, t in options(browser, "pick-view")] == ["heldout accuracy", "boxed share", "mean length"]
    assert shown(browser, "#results .view") == ["view-0"]
    choose(browser, "pick-view", "view-2")
    assert shown(browser, "#results .view") == ["view-2"]
    names = dict(map(reversed, options(browser, "pick-curve")))
    choose(browser, "pick-curve", names["kl"])
    assert shown(browser, "#curves .view") == [names["kl"]]
    assert browser.errors == []


def test_values_of_a_step_under_the_pointer_and_by_keys(browser, run):
    browser.open(run / "report.html")
    names = dict(map(reversed, options(browser, "pick-curve")))
    figure = names["reward/mean"]
    choose(browser, "pick-curve", figure)
    read = f"[...document.querySelectorAll('#{figure} .legend .num')].map(e=>e.textContent)"
    at = f"document.querySelector('#{figure} .at').textContent"

    def means(step):
        lines = [line for line in metrics() if line["step"] == step]
        return [f"{sum(x['reward/mean'] for x in lines if x['arm'] == arm) / 3:.3f}" for arm in ARMS]

    last = browser.run(read)
    assert last == means(29) and browser.run(at) == "last step"
    browser.move(f"#{figure} .plot", share=0.01 + 0.98 * 10 / 29)
    assert browser.run(at) == "step 10" and browser.run(read) == means(10)
    assert browser.run(f"document.querySelector('#{figure} .cursor').getAttribute('x1')") == f"{1 + 98 * 10 / 29:.2f}%"
    browser.run(f"document.querySelector('#{figure} .plot').focus()")
    browser.key("ArrowLeft")
    assert browser.run(at) == "step 9" and browser.run(read) == means(9)
    browser.key("Home")
    assert browser.run(at) == "step 0"
    browser.run("document.activeElement.blur()")
    assert browser.run(at) == "last step" and browser.run(read) == last


def test_arms_can_be_hidden(browser, run):
    browser.open(run / "report.html")
    button = "document.querySelector('#curve-0 .legend button[data-arm=\"1\"]')"
    off = "document.querySelectorAll('g.off').length"
    pages = browser.run("document.querySelectorAll('figure[id^=curve-]').length")
    browser.run(f"{button}.click()")
    assert browser.run(off) == pages and browser.run(f"{button}.getAttribute('aria-pressed')") == "false"
    browser.run(f"{button}.click()")
    assert browser.run(off) == 0 and browser.run(f"{button}.getAttribute('aria-pressed')") == "true"


def test_opens_with_the_last_training_group_of_the_headline(browser, run):
    browser.open(run / "report.html")
    value = browser.run("document.querySelector('#pick-tree').value")
    label = browser.run("document.querySelector('#pick-tree').selectedOptions[0].textContent")
    assert label == "pool · step 29 · train · task 17, mean reward 0.750"
    assert shown(browser, ".panel") == [value]


def test_numbers_of_a_token_by_pointer_and_by_keys(browser, run):
    browser.open(run / "report.html")
    panel = browser.run("document.querySelector('#pick-tree').value")
    readout = "document.querySelector('#readout').hidden ? null : document.querySelector('#readout').textContent"
    assert browser.run(readout) is None
    place, ident, logprob, advantage = browser.run(f"document.querySelector('#{panel} .t').dataset.v").split(" ")
    text = browser.run(f"document.querySelector('#{panel} .t').textContent")
    want = f'token {place}  "{text}"  id {ident} · log-prob {logprob}'
    browser.move(f"#{panel} .t")
    assert browser.run(readout).startswith(want) and browser.run(readout).endswith(f"advantage {advantage}")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.run(readout) is None
    browser.run(f"document.querySelector('#{panel} .toks').focus()")
    assert browser.run(readout).startswith("token 1  ")
    browser.key("ArrowRight")
    assert browser.run(readout).startswith("token 2  ")
    browser.key("End")
    count = browser.run(f"document.querySelector('#{panel} .toks').querySelectorAll('.t').length")
    assert browser.run(readout).startswith(f'token {count}  "<|im_end|>"')
    browser.key("Escape")
    assert browser.run(readout) is None and browser.errors == []


def test_colour_by_advantage_or_logprob(browser, run):
    browser.open(run / "report.html")
    panel = browser.run("document.querySelector('#pick-tree').value")
    colour = f"getComputedStyle(document.querySelector('#{panel} .t.n4')).backgroundColor"
    by_advantage = browser.run(colour)
    assert by_advantage.startswith("rgba(226, 92, 20")
    browser.run("document.querySelector('input[value=logprob]').click()")
    unlikely = f"getComputedStyle(document.querySelector('#{panel} .t.l3')).backgroundColor"
    assert browser.run(unlikely).startswith("rgba(132, 60, 196") and browser.run(colour) != by_advantage


def test_the_tree_opens_node_by_node(browser, run):
    browser.open(run / "report.html")
    value = next(v for v, label in options(browser, "pick-tree") if "search" in label)
    choose(browser, "pick-tree", value)
    assert browser.run("document.querySelector('.signal-name').textContent") == "reward"
    count = f"document.querySelectorAll('#{value} .node').length"
    assert browser.run(count) == 0
    browser.run(f"document.querySelector('#{value} summary').click()")
    browser.run("new Promise(r=>setTimeout(r,50))")
    assert browser.run(count) == 4  # the root and its children
    child = f"document.querySelector('#{value} .tree ul ul button')"
    browser.run(f"{child}.click()")
    assert browser.run(count) == 7 and browser.run(f"{child}.getAttribute('aria-expanded')") == "true"
    browser.run(f"{child}.click()")
    assert len(shown(browser, f"#{value} .node")) == 4
    text = browser.run(f"document.querySelector('#{value} .tree ul ul .node').innerText").split()
    assert " ".join(text[1:]) == "thought, sampled value 0.500 visits 27 prior 0.333 tokens 9 children 3 step 0.0"


def test_many_children_come_in_portions(browser, tmp_path):
    tree = TokenTree([1], task="wide")
    for k in range(300):
        tree.add(0, [k], sampled=True, reward=float(k))
    write_report(write_run(tmp_path, trees=[(tree, {})]))
    browser.open(tmp_path / "report.html")
    browser.run("document.querySelector('.treebox summary').click()")
    browser.run("new Promise(r=>setTimeout(r,50))")
    count = "document.querySelectorAll('.node').length"
    assert browser.run(count) == 41
    assert browser.run("document.querySelector('.more').textContent") == "show 40 more of 260"
    browser.run("document.querySelector('.more').click()")
    assert browser.run(count) == 81 and browser.errors == []


@pytest.mark.parametrize("width", [1200, 360])
def test_hostile_text_does_not_run(browser, tmp_path, width):
    """The task's id, the model's tokens, reasons, examples: everything that a model or a data file may hold."""
    tree = TokenTree([1], task="<img src=x onerror=alert(1)>" * 30)
    for _ in range(2):
        node = tree.add(0, [2, 3], sampled=True, logprobs=[-1, -2], reward=1.0)
        tree.meta[node] |= {
            "why": "<script>window.hit=1</script>",
            "parts": {"</script><script>window.hit=1</script>": 1.0},
        }
    long = "x" * 3000
    arms = {EVIL: {EVIL: cell(0.5, [0.5])}, long: {long: cell(-1.0, [-1.0]), EVIL: None}}
    examples = [{"prompt": EVIL, "before": long, "after": EVIL, long: long}]
    data = results(arms=arms, claim=long, recipe=long, model=long, verdict=long, verdict_rule=EVIL, examples=examples)
    lines = [{"step": 0, "arm": a, EVIL: 1.0, long: 2.0} for a in (EVIL, long)]
    config = {"deep": {long: EVIL, "value": long}}
    write_run(
        tmp_path, results_=data | {"extra": {EVIL: long}}, lines=lines, trees=[(tree, {"arm": long})], config=config
    )
    write_report(tmp_path, decode_token=lambda i: {1: EVIL, 2: "<script>window.hit=1</script>", 3: long}[i])
    browser.open(tmp_path / "report.html", width=width)
    browser.run("document.querySelectorAll('details').forEach(d=>d.open=true)")
    browser.run("new Promise(r=>setTimeout(r,100))")
    assert browser.run("window.hit") is None and browser.run("document.images.length") == 0
    assert browser.run("document.querySelector('.tree .says').textContent").startswith("</script></style><img")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.errors == [] and len(browser.requests) == 1


def test_the_policy_would_stop_what_escaping_missed(browser, run, tmp_path):
    html = (run / "report.html").read_text()
    page = tmp_path / "report.html"
    page.write_text(html.replace("</h1>", "<script>window.hit=1</script><i id=i onclick='window.hit=2'>x</i></h1>", 1))
    browser.open(page)
    browser.run("document.getElementById('i').click()")
    assert browser.run("window.hit") is None and browser.errors  # refused, and said so


def test_without_a_script_everything_but_the_tree_view_can_be_read(browser, run):
    browser.open(run / "report.html", script=False)
    try:
        html = browser.send("DOM.getOuterHTML", nodeId=browser.send("DOM.getDocument")["root"]["nodeId"])["outerHTML"]
        assert html.count('class="view"') == 3 + 8 and " hidden" in html.split('id="readout"')[1][:60]
        assert 'class="panel" id="tree-0" hidden' not in html and "runs none" in html
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [1200, 360])
def test_an_unfinished_run_and_twenty_arms(browser, tmp_path, width):
    arms = [f"arm number {i} with a long name" for i in range(20)]
    tok = tokenizer()
    trees = [(group(tok), {"arm": a}) for a in arms] + [(search_tree(tok=tok), {"arm": arms[0]})]
    path = write_run(
        tmp_path, lines=metrics(steps=40, arms=arms, seeds=(0,)), trees=trees, tok=tok, config={"recipe": "x"}
    )
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    write_report(path)
    browser.open(path / "report.html", width=width)
    assert browser.errors == [] and browser.run("document.documentElement.scrollWidth") <= width
    assert "results.json is missing" in browser.run("document.querySelector('.problems').innerText")
    assert browser.run("document.querySelectorAll('#curve-0 .legend button').length") == 20
