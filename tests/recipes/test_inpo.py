"""The recipe: its world and exact values, its arms, the smoke profile, resume, the paper profile with a tiny model."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from forethought.config import apply_overrides, from_dict, to_dict
from forethought.errors import ConfigError, DataError
from forethought.learn.online import merge_metrics
from forethought.learn.preference_game import GameTrainer
from forethought.models.engine import Sampling
from forethought.models.load import load_model, save_pretrained
from forethought.models.policy import Policy
from forethought.models.tiny import byte_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.recipes import inpo
from forethought.recipes.inpo.arms import ARMS, arm_job, game_config
from forethought.recipes.inpo.games import CYCLE, bradley_terry, dual_gap, kl, log_policy
from forethought.recipes.inpo.measure import Exact
from forethought.recipes.inpo.tables import TableConfig, play_all, said
from forethought.recipes.inpo.world import (
    MiniatureConfig,
    RoleOracle,
    Words,
    demonstrations,
    game_of,
    letter,
    new_policy,
    role,
    rows_of,
    tasks,
)
from forethought.recipes.jobs import Job
from forethought.report.html import write_report
from forethought.rundir import RunDir, read_metrics
from forethought.tree.tree import TokenTree

SMOKE = inpo.PROFILES["smoke"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    with RunDir.create(folder, SMOKE) as run:
        run.write_json("results.json", inpo.run(SMOKE, run, profile="smoke"))
    return folder


@pytest.fixture(scope="module")
def found(smoke):
    return json.loads((smoke / "results.json").read_text())


@pytest.fixture(scope="module")
def reference(smoke):
    model, tokenizer = load_model(smoke / "arms" / "pretraining" / "seed0" / "model", dtype="float32", device="cpu")
    return Policy(model, tokenizer)


# -- the world ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word, expected",
    [("abcc", "c"), ("ba", "b"), ("abcab", "a"), ("bbaa", "b"), ("", None), ("a=b", None), ("abcabc", None)],
)
def test_the_class_of_a_word(word, expected):
    assert letter(word) == expected


def test_roles_follow_the_order_of_the_prompt():
    every = tasks(MiniatureConfig())
    assert len(every) == 16 and len({t["prompt"] for t in every}) == 16
    assert Counter(t["order"] for t in every).most_common(1)[0][1] == 3  # six orders in turn
    third = next(t for t in every if t["order"] == "cab")
    assert third["prompt"] == f"{third['id']}cab=" and [role(third, w) for w in ("ccc", "aba", "bb", "-")] == [
        0,
        1,
        2,
        3,
    ]
    oracle = RoleOracle(game_of(MiniatureConfig()))
    assert oracle.compare([(third, "ccc", "aba"), (third, "bb", "ccc"), (third, "-", "bb"), (third, "aa", "aaa")]) == [
        0.9,
        0.7,
        0.05,
        0.5,
    ]
    assert oracle.queries == 4


def test_the_scalar_reward_is_the_best_fit_of_the_same_preferences():
    P = game_of(MiniatureConfig(shares=(1 / 3, 1 / 3, 1 / 3)), "bradley-terry")
    assert P[:3, :3] == pytest.approx(bradley_terry([0.2703, -0.1352, -0.1352]), abs=5e-5)
    assert P + P.T == pytest.approx(np.ones((4, 4)))


def test_demonstrations_have_the_shares_and_the_lengths():
    config = MiniatureConfig()
    rows = demonstrations(config, 3000, 0)
    played = Counter(role(task, word) for task, word in rows)
    assert [played[k] / 3000 for k in range(4)] == pytest.approx([0.15, 0.7, 0.15, 0], abs=0.025)
    assert {len(word) for _, word in rows} == {3, 4, 5}
    assert rows[:50] == demonstrations(config, 50, 0)


def test_exact_probabilities_are_those_of_the_policy(reference):
    config = MiniatureConfig(prompts=3)
    words = Words(tasks(config), reference.tokenizer)
    assert len(words.words) == 363
    exact = words.log_probs(reference)
    assert np.exp(exact).sum(1) == pytest.approx([1, 1, 1], abs=1e-6)
    engine = TorchEngine(reference)
    for x, task in enumerate(words.tasks):
        tree = TokenTree(reference.tokenizer.encode(task["prompt"]))
        for word in ("b", "ab", "cab", "abcab"):
            leaf = tree.add(0, [*reference.tokenizer.encode(word), reference.tokenizer.eos_token_id])
            (scored,) = engine.score([(tree, leaf)])
            want = scored[-len(word) - 1 :].sum()
            assert exact[x, words.words.index(word)] == pytest.approx(float(want), abs=1e-4)
    # The sampler plays the roles as often.
    roles = np.exp(words.by_role(exact))
    assert roles.sum(1) == pytest.approx([1, 1, 1], abs=1e-6)
    tree = TokenTree(reference.tokenizer.encode(words.tasks[0]["prompt"]), task="A")
    (nodes,) = engine.extend([(tree, 0)], 2000, Sampling(max_tokens=6, seed=1))
    sampled = Counter(
        role(words.tasks[0], reference.tokenizer.decode(tree.node_ids(n), skip_special_tokens=True))
        if int(tree.length[n]) and tree.node_ids(n)[-1] == reference.tokenizer.eos_token_id
        else 3
        for n in nodes
    )
    assert [sampled[k] / 2000 for k in range(4)] == pytest.approx(roles[0], abs=0.04)


def test_the_gap_of_answers_is_that_of_the_whole_game():
    """By the closed form over all words against roles plus what drifted within them."""
    config = replace(SMOKE, miniature=MiniatureConfig(prompts=2, width=16, layers=1))
    policy = new_policy(config.miniature)
    look = Exact(config, policy)
    for p in policy.model.parameters():
        p.data += 0.3 * p.data.abs().mean() * (p.data > 0)
    look(0)
    now = look.words.log_probs(policy)
    gaps = []
    for x in range(2):
        roles = np.append(look.words.roles[x], 3)
        gaps.append(dual_gap(look.P[np.ix_(roles, roles)], now[x], look.reference[x], config.tau))
    assert look.last["eval/dual_gap_answers"] == pytest.approx(float(np.mean(gaps)), abs=1e-9)
    assert look.last["eval/dual_gap_answers"] > look.last["eval/dual_gap"] > 0
    assert look.last["eval/kl_reference"] == pytest.approx(float(np.mean(kl(now, look.reference))))


# -- arms --------------------------------------------------------------------------------------------------------------


def test_the_arms_differ_in_what_their_names_say():
    config = inpo.PROFILES["mini"]
    made = {arm: game_config(config, arm, 0) for arm in ARMS if arm != "reference"}
    same = {"iterations": 24, "prompts_per_iteration": 128, "samples": 8}
    assert all(getattr(c, k) == v for c in made.values() for k, v in same.items())  # equal sampled pairs
    assert len({c.seed for c in made.values()}) == len(made)
    got = {arm: (c.loss, c.beta, c.base, c.eta, c.tau, c.pair_mode) for arm, c in made.items()}
    assert got["INPO"] == ("inpo", None, "reference", 1.0, 0.1, "iid")
    assert got["INPO, soft labels"][-1] == "soft" and got["INPO, tournament"][-1] == "tournament"
    assert got["INPO, tau 0"][3:5] == (1.0, 0.0)
    assert got["DPO"][:3] == ("dpo", 0.05, "reference") and got["DPO, tuned beta"][1] == config.dpo_tuned_beta > 0.05
    assert got["DPO, base previous"][:3] == ("dpo", config.dpo_previous_beta, "previous")
    assert got["IPO"][:3] == ("ipo", config.ipo_beta, "reference")
    assert got["SPPO"][:2] == ("sppo", config.sppo_beta) and made["Nash-MD"].epochs == 1
    growing = game_config(replace(config, eta_schedule="growing"), "INPO", 0)
    assert [growing.numbers(t).eta for t in (1, 2)] == pytest.approx([0.15, 0.2])
    own = replace(config, dpo_lr=5e-4)
    assert game_config(own, "DPO", 0).optim.lr == 5e-4 and game_config(own, "IPO", 0).optim.lr == config.game.optim.lr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["arms=[INPA]"], "'INPA' is not known; did you mean 'INPO'"),
        (["arms=[]"], "give at least one, each once"),
        (["seeds=[1,1]"], "seeds=.*each once"),
        (["tau=2"], "tau=2.0 exceeds eta=1.0: the weight 1 - tau/eta"),
        (["tau=-0.1"], "tau=-0.1: give 0 or more"),
        (["eta=0"], "eta=0.0: give a positive number"),
        (["oracle=judge"], "oracle='judge': the miniature knows preferences and bradley-terry"),
        (["game.loss=dpo"], "game.loss, game.eta and game.tau are set by the arms"),
        (["game.prompts_per_iteration=100"], "give a multiple of miniature.prompts=16"),
        (["game.samples=6"], "arm 'INPO, tournament': .*power of two"),
        (["ipo_lr=0"], "ipo_lr=0.0: give a positive number"),
        (["dpo_beta=0"], "arm 'DPO': .*beta=0.0"),
        (["workers=-1"], "workers=-1"),
        (["model=some/model", "arms=['INPO, scalar reward']"], "is of the miniature"),
        (["miniature.shares=[0.5,0.5,0.5]"], "they sum to 1.5"),
        (["miniature.preferences=[[0.5,0.9,0.3],[0.2,0.5,0.8],[0.7,0.2,0.5]]"], r"P\[0, 1\] \+ P\[1, 0\] = 1.1"),
        (["miniature.purity=0.3"], "purity=0.3"),
        (["table.tau=0"], "table: tau=0.0: give a positive number"),
        (["table.shares=[1]"], "give 3 numbers"),
        (["etta=1"], "did you mean 'eta'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(inpo.PROFILES["mini"], settings)


# -- the exact game ----------------------------------------------------------------------------------------------------


def test_the_table_says_what_the_spec_says():
    table = play_all(TableConfig(iterations=300, seeds=2))
    assert table["game"]["critical eta"] == pytest.approx(0.2945, abs=5e-5)
    assert table["game"]["equilibrium"] == pytest.approx([0.36959, 0.21584, 0.41456], abs=1e-5)
    assert len(said(table["rows"])) == 6 and all(said(table["rows"]).values())
    assert table["rows"]["INPO, tournament"]["gap, last"] == pytest.approx(0.0474, abs=1e-4)
    curve = table["curves"]["INPO, 200 pairs"]
    assert curve["step"][0] == 0 and curve["step"][-1] == 300 and curve["mean"][0] == pytest.approx(0.0474, abs=1e-4)
    assert curve["lo"][-1] < curve["mean"][-1] < curve["hi"][-1]
    assert table["curves"]["INPO, eta 1"]["lo"] == [None] * len(curve["step"])


# -- the smoke profile -------------------------------------------------------------------------------------------------


def test_smoke_profile_has_every_piece(smoke, found):
    assert found["schema"] == 1 and found["recipe"] == "inpo" and found["profile"] == "smoke"
    assert list(found["arms"]) == list(SMOKE.arms) and found["verdict"] == "not shown"  # one seed has no interval
    for arm in found["arms"].values():
        assert 0 <= arm["gap, last 10"]["mean"] <= 2 and arm["gap, last 10"]["n"] == 1
    trained = [found["budget"][arm] for arm in SMOKE.arms if arm != "reference"]
    assert {row["env_steps"] for row in trained} == {2 * 12 * 8}  # the same sampled answers for all
    assert found["budget"]["INPO"]["verifier_calls"] == found["budget"]["INPO"]["pairs_trained"] <= 2 * 12 * 4
    assert found["budget"]["INPO, tournament"]["pairs_trained"] <= 2 * 12
    rows = [r for r in read_metrics(smoke) if r["arm"] == "INPO"]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert rows[0]["eval/dual_gap"] == pytest.approx(found["arms"]["reference"]["gap, last"]["mean"])
    assert rows[-1]["eval/dual_gap"] == pytest.approx(found["arms"]["INPO"]["gap, last"]["mean"])
    late = [r["eval/dual_gap"] for r in rows[1:]]
    assert found["arms"]["INPO"]["gap, last 10"]["mean"] == pytest.approx(sum(late) / 2)
    assert found["arms"]["reference"]["swing, last 10"]["mean"] == 0
    assert sum(r.get("pairs/made", 0) for r in rows) == found["budget"]["INPO"]["pairs_trained"]
    assert any(note.startswith("not measured: INPO is better than DPO") for note in found["notes"])


def test_the_report_draws_the_gaps(smoke, found):
    curve = found["curves"]["eval/dual_gap"]["DPO"]
    assert curve["step"] == [0, 1, 2] and len(curve["mean"]) == 3
    assert set(found["curves"]["exact game/dual_gap"]) == set(found["tables"][next(iter(found["tables"]))])
    page = write_report(smoke).read_text()
    assert "exact game/dual_gap" in page and "eval/dual_gap" in page


def test_lines_of_an_iteration_are_merged():
    assert merge_metrics(
        [{"loss": 1.0, "tokens/trained": 5.0}, {"loss": 3.0, "tokens/trained": 7.0, "pairs/made": 4.0}]
    ) == {
        "loss": 2.0,
        "tokens/trained": 12.0,
        "pairs/made": 4.0,
    }


def test_a_stopped_arm_goes_on_as_if_it_had_not_been(smoke, tmp_path, monkeypatch):
    config = replace(SMOKE, save_every=1, keep_models=True, output="mixture")
    job = Job("INPO", 0, arm_job, config, {"config": config, "root": str(smoke)})

    def play(place, resume=False):
        with RunDir.create(place, config, resume=resume) as run:
            return arm_job(job, run), run.metrics()

    whole, lines = play(tmp_path / "whole")
    assert whole["gap, last"] == json.loads((smoke / "arms/INPO/seed0/done.json").read_text())["gap, last"]
    step = GameTrainer.train_step
    calls = []

    def breaks(self, progress=None):
        calls.append(self.iteration)
        if self.iteration == 1:
            raise KeyboardInterrupt
        return step(self, progress)

    monkeypatch.setattr(GameTrainer, "train_step", breaks)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "broken")
    monkeypatch.setattr(GameTrainer, "train_step", step)
    again, relines = play(tmp_path / "broken", resume=True)
    del again["wall_s"], whole["wall_s"]
    assert again == whole

    def timeless(rows):
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    assert timeless(relines) == timeless(lines)
    # The mixture's iterates are kept, each a model of its own.
    kept = sorted(p.name for p in (tmp_path / "broken" / "iterates").iterdir())
    assert kept == ["0001", "0002"]
    model, tokenizer = load_model(tmp_path / "broken" / "iterates" / "0002", dtype="float32", device="cpu")
    look = Exact(config, Policy(model, tokenizer))
    assert np.mean(np.exp(look.ref_roles[:, -1])) == pytest.approx(whole["stray answers"], abs=1e-6)


def test_inpo_with_soft_labels_moves_towards_the_equilibrium(smoke, tmp_path):
    config = apply_overrides(
        SMOKE, ["pair_mode=soft", "eta=0.5", "game.iterations=5", "game.epochs=2", "game.prompts_per_iteration=48"]
    )
    with RunDir.create(tmp_path / "run", config) as run:
        done = arm_job(Job("INPO", 3, arm_job, config, {"config": config, "root": str(smoke)}), run)
        gaps = [row["eval/dual_gap"] for row in run.metrics()]
    assert gaps[-1] < 0.6 * gaps[0] and done["win rate against the reference"] > 0.55


# -- the verdict -------------------------------------------------------------------------------------------------------


def row(gap):
    return {"gap, last 10": gap, "gap, mixture": gap / 2}


def verdict(table_holds=True, **gaps):
    config = replace(
        inpo.PROFILES["mini"], arms=("reference", "INPO", "DPO", "DPO, base previous", "SPPO"), seeds=(0, 1, 2)
    )
    values = {
        "reference": (0.18, 0.18, 0.18),
        "INPO": (0.010, 0.014, 0.012),
        "DPO": (0.3, 0.4, 0.35),
        "previous": (0.1, 0.15, 0.12),
        "SPPO": (0.06, 0.07, 0.08),
    } | gaps
    per_arm = {{"previous": "DPO, base previous"}.get(a, a): [row(v) for v in given] for a, given in values.items()}
    spread = 1.0 if table_holds else 0.0
    table = {
        "rows": {
            "INPO, eta 1": {"KL, last 100": 1e-9},
            "INPO, eta 0.2": {"spread, second half": spread},
        }
    }
    return inpo.judge(config, table, per_arm, "gap, last 10")


def test_the_verdict_follows_the_rule():
    said, differences, notes = verdict()
    assert said == "shown" and all(note.startswith("met") for note in notes)
    assert differences["INPO minus DPO"]["mean"] == pytest.approx(-0.338)
    assert verdict(SPPO=(0.01, 0.07, 0.02))[0] == "not shown"  # the interval holds 0
    assert verdict(SPPO=(0.001, 0.002, 0.001))[0] == "reversed"
    assert verdict(reference=(0.02, 0.02, 0.02))[0] == "not shown"  # it began near the equilibrium
    said, _, notes = verdict(table_holds=False)
    assert said == "not shown" and "not met: exact game: INPO at eta 0.2, below the critical eta, goes round" in notes


# -- a pretrained model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    save_pretrained(tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=2048), tokenizer, folder)
    return folder


def files(folder, prompts=6):
    (folder / "oracle.py").write_text(
        "def longer(task, a, b):\n    return 0.5 if len(a) == len(b) else 0.9 if len(a) > len(b) else 0.1\n"
        "def vowels(task, a, b):\n    x, y = (sum(c in 'aeiou' for c in t) for t in (a, b))\n"
        "    return 0.5 if x == y else 0.8 if x > y else 0.2\n"
    )
    rows = [{"prompt": f"Write {n}"} for n in range(prompts)] + [{"prompt": "x" * 500}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "held.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(4)))
    return folder


@pytest.mark.parametrize("name", list(inpo.PROFILES))
def test_profiles_survive_their_file(name):
    config = inpo.PROFILES[name]
    assert from_dict(inpo.INPOConfig, to_dict(config)) == config


def test_paper_profile_resolves_to_the_published_settings():
    paper = inpo.PROFILES["paper"]
    made = game_config(paper, "INPO, tournament", 0)
    assert (made.iterations, made.prompts_per_iteration, made.samples, made.pair_mode) == (3, 20_000, 8, "tournament")
    assert made.numbers().eta == 0.005 and made.numbers().tau == pytest.approx(0.005 / 3)
    assert made.optim.lr == 5e-7 and made.optim.schedule == "cosine" and made.batch_size == 128
    assert made.optim.warmup_steps == round(0.03 * made.inner_steps) and not made.keep_truncated
    assert made.max_new_tokens == 2048 and paper.files.max_prompt_tokens == 1000


def test_paper_profile_runs_with_a_tiny_model(tiny_chat, tmp_path):
    place = files(tmp_path)
    small = apply_overrides(
        inpo.PROFILES["paper"],
        [
            f"model={tiny_chat}",
            f"oracle={place / 'oracle.py'}:longer",
            f"files.held_out_oracle={place / 'oracle.py'}:vowels",
            f"files.prompts={place / 'prompts.jsonl'}",
            f"files.held_out={place / 'held.jsonl'}",
            "files.max_prompt_tokens=60",
            "device=cpu",
            "dtype=fp32",
            "arms=[reference,'INPO, tournament',DPO]",
            "save_every=1",
            "game.iterations=2",
            "game.prompts_per_iteration=4",
            "game.batch_size=2",
            "game.max_new_tokens=8",
            "game.keep_truncated=true",
            "game.optim.lr=1e-3",
            "game.optim.warmup_steps=0",
        ],
    )
    with RunDir.create(tmp_path / "run", small) as run:
        found = inpo.run(small, run, profile="paper")
    arm = found["arms"]["INPO, tournament"]
    assert found["arms"]["reference"]["win rate"]["mean"] == 0.5 and 0 <= arm["win rate"]["mean"] <= 1
    assert found["headline"]["metric"] == "win rate held out oracle" and found["tables"] == {}
    assert 0 <= arm["win rate held out oracle"]["mean"] <= 1 and arm["length"]["mean"] > 0
    assert found["budget"]["DPO"]["env_steps"] == found["budget"]["INPO, tournament"]["env_steps"] == 2 * 4 * 8
    assert 0 < found["budget"]["INPO, tournament"]["tokens_evaluated"] <= 3 * 4 * 8
    assert found["budget"]["reference"]["tokens_trained"] == 0
    assert list(found["differences"]) == ["INPO, tournament minus reference", "INPO, tournament minus DPO"]
    assert found["notes"][-1] == "1 prompt of more than 60 tokens left out"
    load_model(tmp_path / "run" / "arms" / "INPO, tournament" / "seed0" / "model", device="cpu")


def test_what_is_wrong_with_files_is_found_before_anything_is_trained(tiny_chat, tmp_path):
    place = files(tmp_path)
    base = [f"model={tiny_chat}", f"files.prompts={place / 'prompts.jsonl'}", f"files.held_out={place / 'held.jsonl'}"]
    (place / "bad.py").write_text("def f(task, a, b):\n    return 1.5\n")
    (place / "empty.jsonl").write_text("")
    for settings, error, message in (
        ([], ConfigError, "oracle='': a pretrained model needs a judge of pairs: name FILE.py:NAME"),
        ([f"oracle={place / 'bad.py'}:g"], ConfigError, "'g'"),
        ([f"oracle={place / 'bad.py'}:f"], Exception, "gave 1.5.*give a probability in"),
        ([f"oracle={place / 'oracle.py'}:longer", "files.held_out="], ConfigError, "files.held_out is empty"),
        ([f"oracle={place / 'oracle.py'}:longer", f"files.prompts={place / 'no.jsonl'}"], DataError, "no.jsonl"),
        ([f"oracle={place / 'oracle.py'}:longer", f"files.prompts={place / 'empty.jsonl'}"], DataError, "empty.jsonl"),
    ):
        config = apply_overrides(inpo.PROFILES["paper"], [*base, *settings])
        with RunDir.create(tmp_path / "run", config, overwrite=True) as run, pytest.raises(error, match=message):
            inpo.run(config, run, profile="paper")
        assert not (tmp_path / "run" / "arms").exists()


def test_the_reference_game_of_the_miniature():
    """What the mini begins with, in the exact game: far from the equilibrium, which INPO's tau keeps near the cycle's."""
    ref = log_policy(MiniatureConfig().shares)
    assert dual_gap(CYCLE, ref, ref, 0.1) == pytest.approx(0.1796, abs=1e-4)
    rows = rows_of(MiniatureConfig(), 32)
    assert len({r["id"] for r in rows}) == 32 and rows[16]["prompt"] == rows[0]["prompt"] and math.isfinite(ref.sum())
