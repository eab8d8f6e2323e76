"""The pages hold: Python blocks run, command lines parse, links and settings are those of the code."""

import os
import re
import shlex
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

from forethought.cli import _parser, parse
from forethought.config import from_dict, parse_yaml, to_dict
from forethought.learn.optim import OptimConfig
from forethought.models import registry
from forethought.models.load import LoRA
from forethought.recipes import CATALOGUE, find
from forethought.recipes.env_eval import job_from
from forethought.recipes.own_chain import ChainJob, Measure
from forethought.recipes.own_env import EnvGRPOJob
from forethought.recipes.own_game import INPOJob
from forethought.recipes.own_pairs import DPOJob
from forethought.recipes.own_ppo import PPOJob
from forethought.recipes.own_sft import SFTJob
from forethought.recipes.train import METHODS, method_of
from tinyjob import make_model, write

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_pages_are_there():
    assert {"README.md", "docs/getting-started.md", "docs/data-and-rewards.md", "docs/concepts.md"} <= set(IDS)
    assert "docs/configuration.md" in IDS


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace, in an empty folder with a trained model in it."""
    code = blocks(page, "python")
    if not code:
        return
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "runs" / "mine" / "model")
    names: dict = {"__name__": "docs"}
    for number, block in enumerate(code):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_command_lines_parse(page):
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in "".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:]), line
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"\[(.*?)\]", line):
                assert extra in extras, line
        elif words[0] == "forethought":
            args = parse(_parser(), words[1:])
            if args.command == "run":
                assert find(args.recipe)
            if args.command == "train":
                check_settings(method_of(args).load()[0], args.settings)
            if args.command == "eval" and args.env:
                job_from(args)
            if getattr(args, "model", None) and "/" not in args.model:
                assert registry.lookup(args.model), line
        else:
            pytest.fail(f"{page.name}: what is this? {line}")


def check_settings(job, settings):
    from forethought.config import apply_overrides

    apply_overrides(job(), settings)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if file.parent.name == "results" and not file.exists():
            continue  # results pages are written by full runs
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads], target


def test_the_chain_on_its_page_is_one():
    (text,) = blocks(ROOT / "docs" / "stages.md", "yaml")
    made = from_dict(ChainJob, parse_yaml(text, "stages.md"))
    made.require()
    assert list(made.jobs()) == ["mid-training", "clean", "dpo", "grpo"]


def test_every_system_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    for entry in CATALOGUE:
        page = f"docs/results/{entry.slug}.md"
        assert entry.title in text
        assert page in text if (ROOT / page).is_file() else f"not run in full yet (`{entry.slug}`)" in text


def shown(value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value in ((), []) else str(value)


def test_the_settings_page_is_complete_and_true():
    """Every key with its default, and no other."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    sections = {}
    for head, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        sections[head] = dict(re.findall(r"^\| `(\w+)` \| ?(.*?) ?\|", body, re.M))
    shared = sections["Every job"]
    game = "Preference games"
    heads = {
        "sft": ("Supervised fine-tuning",),
        "grpo": ("GRPO",),
        "ppo": ("PPO",),
        "dpo": ("DPO and IPO",),
        "ipo": ("DPO and IPO",),
        "inpo": (game, "INPO"),
        "sppo": (game, "SPPO"),
        "online-dpo": (game, "Online DPO"),
        "chain": ("Chains",),
    }
    assert set(heads) == set(METHODS)
    for name in heads:
        job, _ = METHODS[name].load()
        told = dict(shared)
        for head in heads[name]:
            told |= sections[head]
        if name == "ipo":
            told = {k: v for k, v in told.items() if k not in ("form", "label_smoothing")}
        if name == "chain":
            del told["micro_tokens"]  # of its stages
        real = {}
        for f in fields(job):
            value = f.default if f.default is not MISSING else f.default_factory()
            if not is_dataclass(value) and f.name != "method":  # groups have tables of their own
                real[f.name] = shown(value)
        assert told == real
    env = {f.name: f.default for f in fields(EnvGRPOJob) if f.default is not MISSING and not is_dataclass(f.default)}
    told = shared | sections["GRPO"] | sections["GRPO in environments"]
    told = {k: v for k, v in told.items() if not k.startswith("reward")}
    assert told == {k: shown(v) for k, v in env.items() if k != "method"}
    assert sections["Optimiser (`optim.`)"] == {k: shown(v) for k, v in to_dict(OptimConfig()).items()}
    assert sections["Measuring a chain (`measure.`)"] == {k: shown(v) for k, v in to_dict(Measure()).items()}
    assert sections["LoRA (`lora.`)"] == {k: shown(v) for k, v in to_dict(LoRA()).items()}
    assert (
        f"`optim.lr` is {SFTJob().optim.lr} for supervised fine-tuning, {DPOJob().optim.lr} for dpo and ipo, "
        f"{INPOJob().optim.lr} for preference\ngames"
    ) in text
    assert f"its `lr` is {PPOJob().critic_optim.lr}, which" in text


def test_the_getting_started_job_trains(tmp_path, monkeypatch, capsys):
    """The page's own records and reward, on a tiny model in place of the large one."""
    from forethought.cli import main
    from forethought.models.load import save_pretrained
    from forethought.models.tiny import byte_tokenizer, tiny_model

    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / "docs" / "getting-started.md", "python")[:2]:
        exec(block, names)
    template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    tokenizer = byte_tokenizer(chat_template=template, context=64)
    save_pretrained(tiny_model(len(tokenizer), width=32, layers=1, heads=2, context=64), tokenizer, "tiny")
    (line,) = (
        row for row in "".join(blocks(ROOT / "docs" / "getting-started.md", "bash")).splitlines() if "steps=30" in row
    )
    words = shlex.split(line)[1:]
    words[words.index("smollm2-135m-instruct")] = "tiny"
    assert main([*words, "steps=1", "max_new_tokens=4", "prompts_per_step=2", "group_size=2"]) == 0
    assert "2 prompts x 2 samples = 4 rollouts a step" in capsys.readouterr().err
    rows = [row for row in os.listdir("runs/mine") if row.endswith(".json")]
    assert {"results.json", "eval_before.json", "eval_after.json", "tokenizer.json"} <= set(rows)
    # Supervised, with the page's column names.
    write(tmp_path / "s.jsonl", [{"prompt": "1+1=", "answer": 2}])
    assert main(["train", "sft", "--model", "tiny", "--chat", "--data", "s.jsonl", "--answer-column", "answer"]) == 0
