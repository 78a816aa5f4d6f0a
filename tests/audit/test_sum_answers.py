"""A party's whole answer of strategies that send sums, audited through its role."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fl_strategies import Knowledge, Party
from fl_strategies._util import Array, content_hash
from fl_strategies.party.role import PartyState
from fl_strategies.privacy import noise
from fl_strategies.privacy.mechanisms import GaussianSums, Release, Source
from fl_strategies.strategies.sums import (
    HISTOGRAM_PARTY,
    MOMENTS_PARTY,
    REGRESSION_PARTY,
    STATISTICS_PARTY,
)
from fl_strategies.strategies.sums import party as party_side
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.moments import SummedMoments
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.statistics import Tally
from fl_strategies.wire import keys
from tests.audit.mechanisms import AuditResult, audit_sums
from tests.audit.sum_cases import (
    CASES,
    calibrated,
    caught_by,
    honest,
    repeat_noise,
    seeded,
)
from tests.toys import CentroidLearner

pytestmark = pytest.mark.slow
RUNS, EPSILON = 1500, 2.0
ROLES: dict[type, Any] = {
    Cells: HISTOGRAM_PARTY,
    Components: REGRESSION_PARTY,
    SummedMoments: MOMENTS_PARTY,
    Tally: STATISTICS_PARTY,
}


def audit_answers(name: str) -> AuditResult:
    """Audit what a party's role answers, many times."""
    case = CASES[name]
    role = ROLES[type(case.summary)]
    public = np.ones((5, 2))
    config = ConfigRecord(
        {
            "privacy-level": "L2",
            "target-epsilon": EPSILON,
            "task": case.task,
            keys.NUM_CLASSES: case.num_classes,
            keys.PUBLIC_HASH: content_hash(public),
            keys.SEED: 0,
        }
    )
    parties = [
        Party(
            x=x,
            y=y,
            public=public,
            num_classes=case.num_classes,
            task=case.task,
            learner_fn=CentroidLearner,
        )
        for x, y in zip(case.x, case.y, strict=True)
    ]
    received, dither = (
        Knowledge(case.summary.kind, case.summary.to_arrays()),
        seeded(),
    )

    def draw(side: int, size: int) -> Array:
        answers = [
            role.train(parties[side], received, config, PartyState())[0].arrays["sums"]
            for _ in range(size)
        ]
        # What was rounded last becomes continuous again, as the exact chances are.
        multiples = case.summary.multiples(case.num_classes, case.task)
        steps = dither.uniform(-0.5, 0.5, (size, *answers[0].shape))
        return np.asarray((np.stack(answers) + steps) * multiples)

    mechanism = calibrated(case.summary.moved(case.num_classes, case.task), EPSILON)
    return audit_sums(mechanism, case.exact, draw, runs=RUNS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the scale of noise once, and draw it from a seed."""
    repeat_noise(monkeypatch)
    known: dict[float, float] = {}
    find = noise.calibrate_scale

    def calibrate(entries: Any, epsilon: float, delta: float, least: float) -> float:
        moved = entries(1.0)[0][0].l2_sensitivity
        if moved not in known:
            known[moved] = find(entries, epsilon, delta, least=least)
        return known[moved]

    monkeypatch.setattr(noise, "calibrate_scale", calibrate)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", CASES)
def test_answers_of_a_party_keep_the_claim(name: str) -> None:
    """Read, charged, summed up, blurred, rounded and cut to 32 bits."""
    result = audit_answers(name)

    assert caught_by(result) == set()
    assert result.lower_bound > 0.05 * result.claimed_epsilon


def half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    release = GaussianSums.release

    def quiet(self: GaussianSums, sums: Array, rng: Source = None) -> Release:
        return release(honest(self, 0.5), sums, rng)

    monkeypatch.setattr(GaussianSums, "release", quiet)


def noise_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    release, kept = GaussianSums.release, list[Array]()

    def again(self: GaussianSums, sums: Array, rng: Source = None) -> Release:
        if not kept:
            kept.append(release(self, np.zeros_like(sums), rng).values)
        return Release(sums + kept[0], self.charges(sums.size))

    monkeypatch.setattr(GaussianSums, "release", again)


def lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party_side, "LARGEST_SUM", 3)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "name", ["histogram", "components of two classes", "moments of a class"]
)
@pytest.mark.parametrize("break_", [half_the_noise, noise_kept, lower_limit])
def test_broken_answers_of_a_party_are_caught(
    break_: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the noise, one noise for the whole life of a process, or another limit."""
    break_(monkeypatch)

    assert "fit" in caught_by(audit_answers(name))
