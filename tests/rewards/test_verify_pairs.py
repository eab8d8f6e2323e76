"""Answer pairs: the 40 shared ones and our own of the same kinds, in process and through the pool."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from forethought.rewards.verify import Verifier, check

SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "math_pairs.jsonl"
OWN = Path(__file__).with_name("verify_pairs.jsonl")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SHARED_PAIRS = read(SHARED) if SHARED.exists() else []
BY_CATEGORY = defaultdict(list)
for _pair in read(OWN):
    BY_CATEGORY[_pair["category"]].append(_pair)


@pytest.mark.skipif(not SHARED_PAIRS, reason="shared/cases/math_pairs.jsonl is not beside the project")
@pytest.mark.parametrize("pair", SHARED_PAIRS, ids=lambda p: p["id"])
def test_shared_pair(pair):
    verdict = check(pair["answer"], pair["gold"], form=pair["form"])
    assert verdict.correct is pair["equal"], f"{pair['why']}: {verdict}"
    assert verdict.extracted is (pair["answer"] != "")
    assert not verdict.timed_out


@pytest.mark.parametrize("category", sorted(BY_CATEGORY))
def test_own_pairs(category):
    wrong = []
    for pair in BY_CATEGORY[category]:
        verdict = check(pair["answer"], pair["gold"], form="final", timeout=20)
        if verdict.correct is not pair["equal"]:
            wrong.append((pair, verdict))
    assert not wrong


def test_own_pairs_cover_both_verdicts():
    pairs = [p for group in BY_CATEGORY.values() for p in group]
    assert len(pairs) > 800
    assert min(len(group) for group in BY_CATEGORY.values()) >= 3
    assert 0.3 < sum(p["equal"] for p in pairs) / len(pairs) < 0.7


def test_a_rational_verdict_does_not_depend_on_the_side():
    """Swapping gold and answer keeps the verdict for plain values (policies for solved equations are one-sided)."""
    for category in ("fraction", "mixed", "scientific", "repeating", "tiny", "thousands", "number"):
        for pair in BY_CATEGORY[category]:
            if pair["answer"].strip():
                assert check(pair["gold"], pair["answer"], form="final").correct is pair["equal"], pair


def test_the_pool_gives_the_verdicts_of_the_process():
    pairs = [p for group in BY_CATEGORY.values() for p in group if p["answer"].strip()]
    with Verifier(workers=2, form="final", timeout=20) as verifier:
        verdicts = verifier.check_many([(p["answer"], p["gold"]) for p in pairs])
    assert [v.correct for v in verdicts] == [p["equal"] for p in pairs]
    assert verifier.calls == len(pairs) and verifier.timeouts == 0
    assert verifier.tiers["structural"] > 100 and verifier.tiers["rational"] > 100 and verifier.tiers["symbolic"] > 5
    assert verifier.limits > 10  # the towers
