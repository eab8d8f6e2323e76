"""The recipe end to end: smoke profile, resume, the paper profile with a tiny model in place of the large one."""

import json
from dataclasses import replace

import pytest

from forethought import recipes
from forethought.config import apply_overrides
from forethought.errors import ConfigError, DataError
from forethought.learn.online import OnlineTrainer
from forethought.models.chat import ChatRenderer
from forethought.models.load import save_pretrained
from forethought.models.tiny import byte_tokenizer, tiny_model
from forethought.recipes import one_shot_rlvr
from forethought.recipes.one_shot_rlvr.arms import ARMS, problems_of
from forethought.recipes.one_shot_rlvr.history import AccuracyHistory
from forethought.recipes.one_shot_rlvr.world import MiniatureConfig, World, miniature
from forethought.rewards.math_rewards import FormatReward, OutcomeReward, RandomReward
from forethought.rundir import RunDir, read_metrics

SMOKE = one_shot_rlvr.PROFILES["smoke"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    with RunDir.create(folder, SMOKE) as run:
        run.write_json("results.json", one_shot_rlvr.run(SMOKE, run, profile="smoke"))
    return folder


def test_smoke_profile_has_every_piece(smoke):
    found = json.loads((smoke / "results.json").read_text())
    assert found["schema"] == 1 and found["recipe"] == "one-shot-rlvr" and found["profile"] == "smoke"
    assert list(found["arms"]) == ["one-shot", "full pool", "base", "format only", "one-shot PPO"]
    for arm in found["arms"].values():
        assert 0 <= arm["heldout accuracy"]["mean"] <= 1 and arm["heldout accuracy"]["n"] == 1
    assert found["verdict"] == "not shown"  # one seed has no interval, and the rule needs one
    rows = read_metrics(smoke)
    assert {r["arm"] for r in rows} >= {"one-shot", "full pool", "format only"}
    steps = [r["step"] for r in rows if r["arm"] == "one-shot"]
    assert steps == [0, 1, 2, 3, 4]
    assert found["budget"]["one-shot"]["verifier_calls"] == 4 * 4 * 4 and found["budget"]["base"]["tokens_trained"] == 0
    assert (
        sum(r.get("tokens/generated", 0) for r in rows if r["arm"] == "one-shot")
        == found["budget"]["one-shot"]["tokens_generated"]
    )
    (ppo,) = {r["step"]: r for r in rows if r["arm"] == "one-shot PPO" and r["step"] == 4}.values()
    assert ppo["loss/value"] is not None and ppo["kl"] >= 0 and "kl/reward" not in ppo
    # The same rollouts as GRPO's; the separate critic's tokens are counted, too.
    assert found["budget"]["one-shot PPO"]["verifier_calls"] == 4 * 4 * 4
    budget = found["budget"]["one-shot PPO"]
    assert budget["tokens_trained"] == 2 * budget["tokens_generated"]
    history = AccuracyHistory.read(smoke / "history.json")
    assert len(history) == 8 and sum(row["n"] for row in history.table()) == 64
    assert found["selection"]["first"][0] in history.indices


def test_a_finished_piece_is_never_run_again(smoke, monkeypatch):
    def no(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(OnlineTrainer, "train_step", no)
    before = (smoke / "metrics.jsonl").read_bytes()
    with RunDir.create(smoke, SMOKE, resume=True) as run:
        again = one_shot_rlvr.run(SMOKE, run, profile="smoke")
    assert again["arms"] == json.loads((smoke / "results.json").read_text())["arms"]
    assert (smoke / "metrics.jsonl").read_bytes() == before


def test_the_arms_differ_in_what_the_table_says():
    assert not ARMS["entropy only"].policy and not ARMS["entropy only"].kl and ARMS["entropy only"].entropy
    assert ARMS["policy only"] == replace(ARMS["one-shot"], decay=False, kl=False, entropy=False)
    world = miniature(MiniatureConfig(pool=6, heldout=4, shifted=4, pretrain_problems=20, pretrain_shifted=5), 1.0, "x")
    history = AccuracyHistory.from_json(
        {str(i): s for i, s in enumerate(([0, 1], [1, 1], [0, 0.5], [0, 0], [1, 0.5], [0.5, 1]))}
    )
    config = one_shot_rlvr.OneShotConfig()
    picked = {
        name: [t["index"] for t in problems_of(arm, config, world, history)]
        for name, arm in ARMS.items()
        if arm.problems != "none"
    }
    assert picked["one-shot"] == ["0"] and picked["impossible problem"] == ["3"] and len(picked["full pool"]) == 6
    gold = world.by_index("0")["answer"]
    guess = problems_of(ARMS["guessable label"], config, world, history)[0]
    assert guess["answer"] != gold and guess["prompt"] == world.by_index("0")["prompt"]
    assert problems_of(ARMS["unguessable label"], config, world, history)[0]["answer"] == "9292725"
    two = apply_overrides(config, ["k=2"])
    assert len(problems_of(ARMS["one-shot"], two, world, history)) == 2


def test_the_ppo_variant_has_the_published_settings():
    paper = one_shot_rlvr.PROFILES["paper"]
    ppo = paper.ppo.config(replace(paper.online, kl_coef=paper.beta, entropy_coef=-paper.alpha))
    assert (ppo.critic, ppo.critic_optim.lr, ppo.optim.lr) == ("separate", 1e-5, 1e-6)
    assert (ppo.gamma, ppo.lam, ppo.value_clip, ppo.whiten) == (1.0, 1.0, 0.5, True)
    assert (ppo.kl_placement, ppo.kl_coef, ppo.kl_estimator, ppo.entropy_coef) == ("loss", 0.001, "k3", 0.001)
    assert (ppo.steps, ppo.prompts_per_step, ppo.group_size, ppo.updates) == (2000, 128, 8, 1)
    reward = replace(paper.ppo, kl_placement="reward").config(replace(paper.online, kl_coef=0.001))
    assert (reward.kl_placement, reward.kl_estimator) == ("reward", "k1")
    every = apply_overrides(SMOKE, ["algorithm=ppo"])
    assert every.algorithm == "ppo" and ARMS["one-shot"].algorithm is None


def test_an_index_that_is_not_in_the_pool_is_named_with_the_fix():
    world = World(pool=[{"index": "3"}], suites={}, model="x", chat=True, dropped=["7"])
    assert world.by_index(3) is world.pool[0]
    with pytest.raises(DataError, match=r"problem index 12 is not among the 1 problems.*raise files.limit"):
        world.by_index("12")
    with pytest.raises(DataError, match=r"problem index 7 .*no gold answer"):
        world.by_index("7")


def test_pool_heldout_shifted_and_demonstrations_share_no_problem():
    world = miniature(MiniatureConfig(pool=64, heldout=100, shifted=50), 1.0, "x")
    pool = {t["prompt"] for t in world.pool}
    heldout = {t["prompt"] for t in world.suites["heldout"][0]}
    assert len(pool) == 64 and len(heldout) == 100 and not pool & heldout
    from forethought.envs.arithmetic import chains

    config = MiniatureConfig()
    shown = {t["prompt"] for t in chains(config.pretrain_problems, 0, "train", config=config.chain)}
    assert not shown & pool and not shown & heldout


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    save_pretrained(tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=2048), tokenizer, folder)
    return folder


def test_paper_profile_resolves_and_runs_with_a_tiny_model(tiny_chat, shared, tmp_path):
    pytest.importorskip("pyarrow")
    paper = one_shot_rlvr.PROFILES["paper"]
    assert (paper.online.steps, paper.online.prompts_per_step, paper.online.group_size) == (2000, 128, 8)
    assert (paper.beta, paper.alpha, paper.online.optim.lr, paper.online.optim.weight_decay) == (
        0.001,
        -0.001,
        1e-6,
        0.01,
    )
    assert [s.name for s in paper.files.suites] == ["math500", "aime24", "amc23", "minerva", "olympiadbench", "aime25"]
    assert (paper.online.temperature, paper.online.max_new_tokens, paper.online.updates_per_rollout) == (0.6, 3072, 1)
    data = shared / "data" / "math"
    suites = [{"name": "math500", "path": str(data / "math500.jsonl"), "system": "Be brief."}]
    small = apply_overrides(
        paper,
        [
            f"model={tiny_chat}",
            f"files.train={data / 'dsr_sub.parquet'}",
            f"files.history={data / 'acc_step_500.json'}",
            f"files.suites={json.dumps(suites)}",
            "device=cpu",
            "dtype=fp32",
            "keep_models=false",
            "arms=[one-shot,base]",
            "curve_problems=2",
            "eval_tokens=4",
            "online.steps=1",
            "online.prompts_per_step=4",
            "online.group_size=2",
            "online.max_new_tokens=4",
            "online.micro_tokens=20000",
        ],
    )
    from forethought.recipes.one_shot_rlvr.world import from_files

    world = from_files(small.files, small.model)
    assert len(world.pool) == 1208 and len(world.dropped) == 1  # one row of the published pool has no gold answer
    assert world.suites["math500"][0][0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    ranking = small.ranking(AccuracyHistory.read(small.files.history))
    assert world.by_index(ranking.order[0])["answer"] == "12.8"  # pi1, the wind problem
    small = replace(
        small, files=replace(small.files, suites=(replace(small.files.suites[0], path=str(_head(data, tmp_path))),))
    )
    with RunDir.create(tmp_path / "run", small) as run:
        found = one_shot_rlvr.run(small, run, profile="paper")
    assert (
        found["arms"]["one-shot"]["math500 accuracy"]["n"] == 1 and found["budget"]["one-shot"]["verifier_calls"] == 8
    )


def _head(data, folder):
    target = folder / "math3.jsonl"
    target.write_text("".join((data / "math500.jsonl").read_text().splitlines(keepends=True)[:3]))
    return target


def test_prompt_with_an_empty_box_earns_nothing(tiny_chat):
    """Acceptance 9 and 11: only the response is scored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    from forethought.tree.tree import TokenTree

    renderer = ChatRenderer(tokenizer)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    tree = TokenTree(renderer.prompt_ids("What is 1+1? Put it in \\boxed{}, for example \\boxed{2}."), task="t", seed=4)
    bare = tree.add(0, renderer.encode("It is 2."), sampled=True)
    wrong = tree.add(0, renderer.encode("\\boxed{3}"), sampled=True)
    task = {"id": "t", "answer": "2"}
    for leaf, outcome, form in ((bare, 0, 0), (wrong, 0, 1)):
        assert OutcomeReward(decode, mode="train-strict")(tree, leaf, task).value == outcome
        assert FormatReward(decode)(tree, leaf, task).value == form
    random = RandomReward(seed=1)
    leaves = [tree.add(0, renderer.encode("x"), sampled=True) for _ in range(400)]
    values = [random(tree, leaf, task).value for leaf in leaves]
    assert 0.4 < sum(values) / 400 < 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["k=17"], "k=17 exceeds online.prompts_per_step=16"),
        (["arms=[one-shto]"], "did you mean 'one-shot'"),
        (["seeds=[0,0]"], "each once"),
        (["online.kl_coef=0.1"], "set through beta and alpha"),
        (["model=some/model"], "files.train is empty"),
        (["model=some/model", "files.train=x.jsonl"], "files.suites is empty"),
        (["arms=[]"], "give at least one, each once"),
        (["workers=-1"], "workers=-1"),
        (["algorithm=ppo", "ppo.lam=2"], r"ppo: lam=2.0: give a number in"),
        (["bata=0.1"], "did you mean 'beta'"),
        (["online.group_size=1"], "group_size=1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(one_shot_rlvr.PROFILES["mini"], settings)


def test_a_missing_pool_is_named_before_a_model_is_loaded(tmp_path):
    config = apply_overrides(
        one_shot_rlvr.PROFILES["paper"], ["files.train=/nowhere/dsr_sub.parquet", "model=/nowhere/model"]
    )
    with RunDir.create(tmp_path / "run", config) as run, pytest.raises(DataError, match="dsr_sub.parquet"):
        one_shot_rlvr.run(config, run, profile="paper")


def test_the_best_checkpoint_is_restored():
    from forethought.learn.optim import OptimConfig, Optimizer
    from forethought.recipes.one_shot_rlvr.arms import _Best
    from tinymodels import tiny

    model = tiny("llama")
    optimizer = Optimizer(model, OptimConfig(), total_steps=3)
    scores = iter([0.2, 0.6, 0.4])
    best = _Best(optimizer, lambda step: {"eval/accuracy": next(scores), "eval/boxed": 1.0})
    for step in range(3):
        with_step = {n: w + step for n, w in optimizer.master_state().items()} if step else optimizer.master_state()
        optimizer.load_masters({n: w.clone() for n, w in with_step.items()})
        weights = {n: w.clone() for n, w in optimizer.master_state().items()}
        best(step)
        if step == 1:
            wanted = weights
    assert best.restore() == 1.0
    assert all((w == wanted[n]).all() for n, w in optimizer.master_state().items())


def test_catalogue():
    assert recipes.find("one-shot-rlvr").paper.endswith("2504.20571")
    with pytest.raises(ConfigError, match="did you mean 'one-shot-rlvr'"):
        recipes.find("oneshot-rlvr")
    assert set(recipes.load("one-shot-rlvr").PROFILES) == {"smoke", "mini", "paper"}
