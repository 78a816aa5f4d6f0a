"""FedKD with evidence: skewed parties, other domains, what travels and what is promised."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

from clients import SklearnLearner, client_app
from fl_strategies import FedKD, Party
from fl_strategies._util import Array, IntArray
from fl_strategies.party.role import LEAST_COVERAGE, contrasted, coverage, log_ratio_to_public
from fl_strategies.privacy.accountant import claim
from fl_strategies.privacy.mechanisms import LaplaceCounts, Release
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid, run_local
from tests.toys import (
    Careful,
    WatchedGrid,
    load_toy_party,
    load_with,
    toy_fedkd,
    toy_party,
    with_meta,
    without_records,
)

NUM_PARTIES = 4
CENTRES = np.array([[0.0, 0.0], [2.5, 0.0], [0.0, 2.5]])


def draw(labels: IntArray, seed: int, shift: float = 0.0) -> Array:
    rng = np.random.default_rng(seed)
    return CENTRES[labels] + rng.normal(size=(len(labels), 2)) + shift


LABELS = np.random.default_rng(0).choice(3, size=600, p=(0.375, 0.375, 0.25))
PUBLIC, TEST = draw(LABELS, 1), draw(LABELS, 2)
HELD = ([0] * 114 + [1] * 6, [1] * 114 + [2] * 6, [2] * 114 + [0] * 6, [0] * 60 + [1] * 60)
"""Labels of each party's records: together those of the public rows, alone one-sided."""


def bayes() -> SklearnLearner:
    return SklearnLearner(GaussianNB(), num_classes=3)


def regression() -> SklearnLearner:
    return SklearnLearner(LogisticRegression(), num_classes=3)


def skewed(number: int, public: Array = PUBLIC, **changes: Any) -> Party:
    y = np.array(HELD[number])
    party = Party(
        x=draw(y, 10 + number),
        y=y,
        public=public,
        num_classes=3,
        partition_id=number,
        learner_fn=(bayes, regression)[number % 2],
        learner_name="own",
    )
    return replace(party, **changes)


def result_of(
    public: Array = PUBLIC, held: tuple[Any, ...] = HELD, **options: Any
) -> tuple[float, dict[str, Any]]:
    """Run a federation; return its accuracy and the server's metrics."""

    def load(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        y = np.array(held[number])
        return skewed(number, public, x=draw(y, 10 + number), y=y)

    strategy = FedKD.from_settings(
        public=public,
        num_classes=3,
        learner_fn=bayes,
        learner_name="bayes",
        num_parties=NUM_PARTIES,
        evaluate=False,
        **options,
    )
    result = run_local(strategy, client_app(load), NUM_PARTIES)
    accuracy = float((strategy.model_.predict(TEST) == LABELS).mean())
    return accuracy, dict(result.train_metrics_clientapp[1])


def alone(number: int) -> float:
    party = skewed(number)
    model = party.learner_fn().fit(party.x, party.y, rng=np.random.default_rng(0))
    return float((model.predict(TEST) == LABELS).mean())


def test_skewed_parties_learn_what_none_of_them_knows() -> None:
    """Above every party and the plain mean, near what the classes allow at all."""
    best = max(alone(number) for number in range(NUM_PARTIES))

    reached, metrics = result_of()

    possible = float(
        (((TEST[:, None] - CENTRES) ** 2).sum(axis=2).argmin(axis=1) == LABELS).mean()
    )
    assert reached > best + 0.1
    assert reached > result_of(weights="uniform")[0] + 0.1
    assert reached > possible - 0.03
    assert metrics["num-uncovered"] == 0
    # A score takes at most a byte; counts, names and metrics of a reply are the rest.
    assert metrics[keys.NUM_BYTES_SENT] / NUM_PARTIES < 3 * len(PUBLIC) + 900


def test_a_contrast_lets_parties_of_one_class_speak() -> None:
    """Each knows a single class; only the public rows tell them what it is not."""
    pure = ([0] * 100, [1] * 100, [2] * 100, [0] * 100)

    with_it, without = (result_of(held=pure, contrast=wanted)[0] for wanted in (True, False))

    assert with_it > 0.7
    assert without < 0.5


def test_public_rows_of_another_domain_are_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """All parties say so, the server warns, and evidence is compared within parties only."""
    far = draw(LABELS, 1, shift=20.0)
    with caplog.at_level("WARNING"):
        _, metrics = result_of(public=far)

    assert metrics["num-uncovered"] == NUM_PARTIES
    assert "unlike their records" in caplog.text


def test_coverage_tells_domains_apart_and_not_classes() -> None:
    """A party with few of the classes is covered; one from elsewhere is not."""
    ratios = {
        shift: [
            coverage(
                log_ratio_to_public(skewed(n, draw(LABELS, 1, shift)), [PUBLIC + shift], 0), 3
            )
            for n in range(NUM_PARTIES)
        ]
        for shift in (0.0, 20.0)
    }

    assert min(ratios[0.0]) > LEAST_COVERAGE + 0.2
    assert max(ratios[20.0]) < LEAST_COVERAGE / 5


def test_the_contrast_estimates_the_ratio_of_densities() -> None:
    """Logistic regression on Gaussians is exact but for sampling: log p(x) / p_public(x)."""
    rng = np.random.default_rng(3)
    public, own = rng.normal(size=(4000, 2)), rng.normal((1.0, 0.0), size=(1000, 2))
    party = replace(
        skewed(1), x=own, y=rng.integers(3, size=1000), public=public, learner_fn=regression
    )

    ratio = log_ratio_to_public(party, [public], seed=0)

    truth = public[:, 0] - 0.5
    assert np.abs(ratio - truth).mean() < 0.15


def test_every_view_of_a_public_row_is_scored_by_a_model_that_has_not_seen_it() -> None:
    """Views of a row share its fold: two equal views have equal ratios."""
    party = skewed(0)
    ratio = log_ratio_to_public(party, [PUBLIC, PUBLIC], seed=0)

    assert (ratio[: len(PUBLIC)] == ratio[len(PUBLIC) :]).all()
    # Three rows cannot be learned from and judged as well.
    assert contrasted(skewed(0, PUBLIC[:3]), [PUBLIC[:3]], 0) == (None, "none")


def tampered(contrast: object) -> WatchedGrid:
    """Return a grid on which one party says something else about its contrast."""
    app = client_app(load_toy_party)
    return WatchedGrid(app, NUM_PARTIES, with_meta("contrast", contrast))


@pytest.mark.parametrize("contrast", ["yes", 1, ""])
def test_a_contrast_nobody_knows_excludes_the_party(contrast: object) -> None:
    """One line names it; the others make the model."""
    strategy = toy_fedkd()
    strategy.start(tampered(contrast), ArrayRecord(), num_rounds=1)

    (why,) = strategy.rejected_.values()
    assert "contrast must be one of none, public, uncovered" in why
    assert strategy.model_ is not None


def test_an_excluded_party_leaves_no_evidence_behind() -> None:
    """The consensus is that of the three others alone, to the bit."""
    targets = []
    last_three = client_app(load_with(without_records, only=0))
    for grid in (tampered("yes"), InMemoryGrid(last_three, NUM_PARTIES)):
        strategy = toy_fedkd()
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        targets.append(strategy.model_.to_arrays()["centroids"].tobytes())  # type: ignore[attr-defined]

    assert targets[0] == targets[1]


def careful_app() -> Any:
    return client_app(
        lambda c: replace(load_toy_party(c), learner_fn=Careful, x_test=None, y_test=None)
    )


def test_private_models_pay_for_their_counts_and_nothing_else() -> None:
    """DP-SGD and noisy counts; evidence follows from both, and there is no contrast."""
    strategy = toy_fedkd(weights="noisy-evidence", count_epsilon=0.5)
    metrics = run_local(strategy, careful_app(), NUM_PARTIES).train_metrics_clientapp[1]

    counts = LaplaceCounts(epsilon=0.5, l1_sensitivity=2.0).charges()
    expected = claim([*counts, *Careful.privacy_events], 1e-5).epsilon
    assert metrics[keys.EPSILON_EXAMPLE] == pytest.approx(expected)
    assert metrics["num-uncovered"] == 0


def test_exact_counts_make_no_promise() -> None:
    """Also beside a private model."""
    strategy = toy_fedkd()
    metrics = run_local(strategy, careful_app(), NUM_PARTIES).train_metrics_clientapp[1]

    assert metrics[keys.EPSILON_EXAMPLE] == math.inf
    assert "exact class counts left the party" in strategy.ledger_.statement()


class Blind(Careful):
    """A private model whose noise has drowned its records."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Any:  # noqa: ARG002
        self.centroids = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
        return self


@pytest.mark.parametrize("weights", ["noisy-evidence", "evidence"])
def test_evidence_depends_on_records_through_model_and_counts_alone(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both fixed, neighbouring records give equal bytes; exact counts do not."""
    fixed = np.array([20.0, 12.0, 8.0])
    monkeypatch.setattr(
        LaplaceCounts, "release", lambda self, *_: Release(fixed, self.charges())
    )
    party = replace(toy_party(0), learner_fn=Blind)
    # The neighbour lacks a class altogether, so that what the party has seen changes too.
    other = np.where(party.y == 2, 0, party.y)
    only = np.flatnonzero(party.y == 2)[0]
    mine = other.copy()
    mine[only] = 2
    sent = []
    for y in (mine, other):
        grid = InMemoryGrid(client_app(lambda _, y=y: replace(party, y=y)), 1)
        strategy = toy_fedkd(weights=weights, num_parties=1, evaluate=False)
        seen: list[bytes] = []
        check = strategy.check
        strategy.check = lambda k, check=check, seen=seen: (  # type: ignore[method-assign]
            seen.extend(array.tobytes() for array in k.arrays.values()),
            check(k),
        )[1]
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        sent.append(seen)

    assert (sent[0] == sent[1]) == (weights == "noisy-evidence")


def test_several_labels_are_corrected_one_by_one() -> None:
    """Two parties with opposite shares of a label agree on it; epsilon counts negatives too."""
    rng = np.random.default_rng(5)
    x, public = rng.normal(size=(400, 2)), rng.normal(size=(300, 2))
    y = (x + rng.normal(scale=0.3, size=x.shape) > 0).astype(np.int64)

    def regressions() -> Any:
        from clients.tabular.multilabel import MultiLabelLearner

        return MultiLabelLearner(
            lambda: SklearnLearner(LogisticRegression(), num_classes=2), num_classes=2
        )

    def load(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        keep = rng.random(400) < np.where(y[:, 0] == number, 0.95, 0.1)
        return Party(
            x=x[keep],
            y=y[keep],
            public=public,
            num_classes=2,
            task="multi-label",
            learner_fn=regressions,
            partition_id=number,
        )

    strategy = FedKD.from_settings(
        public=public,
        num_classes=2,
        task="multi-label",
        learner_fn=regressions,
        num_parties=2,
        evaluate=False,
        weights="noisy-evidence",
    )
    run_local(strategy, client_app(load), 2)

    assert not strategy.rejected_
    assert ((strategy.model_.logits(x) > 0) == y).mean() > 0.85
    assert strategy.options.count_mechanism("multi-label", 2).l1_sensitivity == 4.0
