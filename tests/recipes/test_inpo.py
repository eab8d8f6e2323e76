"""The recipe end to end at its smallest, its table against the spec's words, and its settings."""

import pytest

from forethought.config import apply_overrides, from_dict, to_dict
from forethought.errors import ConfigError
from forethought.recipes import inpo as recipe
from forethought.recipes.inpo.tables import TableConfig, play_all, said
from forethought.rundir import RunDir


def test_smoke(tmp_path):
    config = recipe.PROFILES["smoke"]
    with RunDir.create(tmp_path / "run", config) as run:
        found = recipe.run(config, run, profile="smoke")
    assert list(found["arms"]) == list(config.arms)
    gaps = {arm: row["gap, last 10"]["mean"] for arm, row in found["arms"].items()}
    assert gaps["reference"] == pytest.approx(0.280, abs=0.06) and all(g >= 0 for g in gaps.values())
    pairs = {arm: row["tokens_generated"] for arm, row in found["budget"].items() if arm != "reference"}
    assert all(n > 0 for n in pairs.values())
    assert found["verdict"] == "not shown"  # two iterations of one seed show nothing


def test_the_exact_game_says_what_the_spec_says():
    table = play_all(TableConfig(seeds=2))
    assert table["game"]["equilibrium"] == [0.36959, 0.21584, 0.41456]
    assert table["game"]["omega"] == pytest.approx(0.16415, abs=1e-5)
    assert table["game"]["critical eta"] == pytest.approx(0.2945, abs=1e-4)
    checks = said(table["rows"])
    assert len(checks) == 6 and all(checks.values()), checks


def test_profiles_resolve():
    for name, config in recipe.PROFILES.items():
        assert from_dict(recipe.INPOConfig, to_dict(config)) == config, name
    paper = recipe.PROFILES["paper"]
    assert (paper.eta, round(paper.tau, 6), paper.game.samples, paper.game.iterations) == (0.005, 0.001667, 8, 3)
    assert paper.pair_mode == "tournament" and paper.game.optim.lr == 5e-7


@pytest.mark.parametrize(
    "settings, message",
    [
        (["tau=-0.1"], "tau"),
        (["eta=0"], "eta"),
        (["eta=0.05", "tau=0.1"], "tau"),
        (["arms=[INPO,DOP]"], "DPO"),
        (["game.eta=1"], "leave them alone"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(recipe.PROFILES["mini"], settings)
