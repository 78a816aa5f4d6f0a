"""Answers as evidence, compared with what follows from known densities."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from scipy.stats import norm

from fl_strategies._util import FloatArray
from fl_strategies.aggregation.evidence import (
    LEAST_PART,
    MOST_TIMES_ALIKE,
    SHARPNESS,
    add_label_shares,
    add_share,
    are_alike,
    believed_counts,
    believed_sizes,
    class_weights,
    class_weights_of,
    label_weights_of,
    likely_share,
    limited_mean,
    match_label_shares,
    match_share,
    noisy_weighted_mean,
    pooled_label_shares,
    pooled_share,
    read_counts,
    weighted_mean,
)
from fl_strategies.aggregation.pool import EvidenceConsensus, EvidencePool, read_class_share
from fl_strategies.aggregation.votes import (
    CLASS_COUNTS,
    LEAST_PROBABILITY,
    class_counts,
    class_evidence,
    corrected_labels,
    label_evidence,
    valid_counts,
    vote_evidence,
)
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.privacy.noise import ScorePrivacy
from fl_strategies.wire.knowledge import PlainScores, Quantizer

MEANS = np.array([-1.0, 0.0, 1.5])
ROWS = np.linspace(-1.0, 1.5, 41)  # where no class is below a thousandth
MANY = 1e12
"""So many records that half a record more changes nothing."""


def log_densities(x: FloatArray) -> FloatArray:
    """Return log p(x|c) of three Gaussian classes of deviation 1, (n, 3)."""
    return norm.logpdf(x[:, None], MEANS)


def posterior_logits(x: FloatArray, prior: FloatArray) -> FloatArray:
    """Return what the best possible model of records with these class shares says."""
    with np.errstate(divide="ignore"):
        logits = log_densities(x) + np.log(prior)
    return np.maximum(logits, -1e3)


def centred(values: FloatArray) -> FloatArray:
    return values - values.mean(axis=1, keepdims=True)


# One party.


@pytest.mark.parametrize("prior", [(1 / 3, 1 / 3, 1 / 3), (0.8, 0.1, 0.1), (0.3, 0.1, 0.6)])
def test_evidence_is_the_log_likelihood_whatever_the_class_shares(
    prior: tuple[float, ...],
) -> None:
    """Gaussian classes with known priors: log p(x|c) to 1e-9, but for a constant a row."""
    shares = np.array(prior)
    evidence = class_evidence(posterior_logits(ROWS, shares), MANY * shares)

    assert evidence == pytest.approx(centred(log_densities(ROWS)), abs=1e-9)


def test_a_contrast_makes_evidence_absolute() -> None:
    shares, public = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    own, common = (np.exp(log_densities(ROWS)) @ mix for mix in (shares, public))
    logits = posterior_logits(ROWS, shares)

    evidence = class_evidence(logits, MANY * shares, np.log(own / common))

    expected = log_densities(ROWS) - np.log(common)[:, None]
    assert evidence == pytest.approx(expected, abs=1e-9)


def test_a_class_never_seen_gets_no_opinion() -> None:
    """And the others are compared with each other alone."""
    shares = np.array([0.5, 0.0, 0.5])
    evidence = class_evidence(posterior_logits(ROWS, shares), MANY * shares)

    assert (evidence[:, 1] == 0).all()
    assert evidence[:, [0, 2]] == pytest.approx(centred(log_densities(ROWS)[:, [0, 2]]))


def test_a_party_of_one_class_says_nothing_by_itself() -> None:
    """Without a contrast it has no weight, with one it has."""
    counts = np.array([0.0, 50.0, 0.0])

    assert (class_evidence(np.zeros((4, 3)), counts) == 0).all()
    assert (class_weights_of(counts, contrasted=False) == 0).all()
    assert class_weights_of(counts, contrasted=True)[1] == pytest.approx(math.sqrt(50))


def test_no_answer_is_worth_more_than_a_thousand_to_one() -> None:
    """A model that is certain cannot silence the others."""
    evidence = class_evidence(np.array([[1e6, 0.0]]), np.array([MANY, MANY]))

    assert np.ptp(evidence) == pytest.approx(-math.log(LEAST_PROBABILITY))


def test_a_rare_class_is_not_named_by_a_model_that_is_certain_of_another() -> None:
    """Its probability is cut far below its share, or every row would speak for it."""
    certain = np.log(np.array([[1 - 1e-12, 1e-12]]))

    for rare in (1.0, 10.0, 500.0):
        assert corrected_labels(certain, np.array([5000.0, rare])).tolist() == [0]


def test_labels_are_those_of_equal_class_shares() -> None:
    """A skewed model's plain answer is wrong where its corrected one is right."""
    shares = np.array([0.98, 0.01, 0.01])
    logits = posterior_logits(ROWS, shares)
    right = log_densities(ROWS).argmax(axis=1)

    assert (corrected_labels(logits, MANY * shares) == right).all()
    assert (logits.argmax(axis=1) == right).mean() < 0.5


def test_a_vote_never_names_a_class_without_records() -> None:
    logits = np.array([[0.0, 9.0, 1.0]])

    assert corrected_labels(logits, np.array([5.0, 0.0, 5.0])).tolist() == [2]


def test_labels_have_evidence_of_their_own() -> None:
    """Log-odds without the log-odds of the records; none for labels of one kind only."""
    positives, negatives = np.array([30.0, 0.0]) * 1e9, np.array([10.0, 40.0]) * 1e9
    evidence = label_evidence(np.array([[1.0, 2.0]]), positives, negatives)

    assert evidence[0] == pytest.approx([1.0 - math.log(3), 0.0])
    assert label_weights_of(np.array([30.0, 0.0]), np.array([10.0, 40.0])) == pytest.approx(
        [math.sqrt(7.5), 0.0]
    )


def test_noisy_counts_become_counts_that_could_be_true() -> None:
    """Whole, none below two scales of the noise, and never all of them 0."""
    valid = valid_counts(np.array([0.4, 3.9, 4.2, 99.7]), scale=2.0)

    assert valid.tolist() == [0.0, 4.0, 4.0, 100.0]
    assert valid_counts(np.array([0.0, 1.2, 0.0]), scale=2.0).tolist() == [0.0, 1.0, 0.0]
    assert valid_counts(np.zeros(2), scale=2.0).tolist() == [1.0, 0.0]


# Class shares of public rows.


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_classes=st.integers(2, 6))
def test_the_share_step_reaches_any_shares(seed: int, num_classes: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 3, (50, num_classes))
    share = rng.dirichlet(np.ones(num_classes)) * 0.9 + 0.1 / num_classes

    matched = match_share(scores, share)

    assert softmax(matched, axis=1).mean(axis=0) == pytest.approx(share, abs=1e-5)


def test_the_share_step_is_unique() -> None:
    """Another start ends at the same shift, which another minimiser finds as well."""
    rng = np.random.default_rng(1)
    scores, share = rng.normal(0, 2, (40, 3)), np.array([0.6, 0.3, 0.1])

    matched = match_share(scores, share)
    moved = match_share(scores + np.array([4.0, -7.0, 1.0]), share)

    def convex(shift: FloatArray) -> float:
        return float(logsumexp(scores + shift, axis=1).mean() - share @ shift)

    found = minimize(convex, np.zeros(3), tol=1e-12).x
    assert centred(moved) == pytest.approx(centred(matched), abs=1e-5)
    assert centred(scores + found) == pytest.approx(centred(matched), abs=1e-4)


def test_the_share_step_restores_the_posterior() -> None:
    """Log-densities that lack a constant a class come back as the true posterior."""
    rng = np.random.default_rng(2)
    share = np.array([0.5, 0.2, 0.3])
    labels = rng.choice(3, size=20_000, p=share)
    x = rng.normal(MEANS[labels], 1)
    truth = softmax(posterior_logits(x, share), axis=1)

    matched = match_share(log_densities(x) + np.array([2.0, -1.0, 0.5]), truth.mean(axis=0))

    assert softmax(matched, axis=1) == pytest.approx(truth, abs=1e-4)


def test_a_class_that_nobody_holds_gets_no_row() -> None:
    scores, share = np.zeros((5, 3)), np.array([0.4, 0.0, 0.6])

    for rule in (match_share, add_share):
        shares = softmax(rule(scores, share), axis=1)
        assert np.isfinite(rule(scores, share)).all()
        assert shares[0] == pytest.approx(share, abs=1e-9)


def test_shares_must_be_shares() -> None:
    with pytest.raises(InvalidData, match="3 numbers that sum to 1"):
        match_share(np.zeros((2, 3)), np.array([0.5, 0.2, 0.2]))


def test_labels_are_shifted_one_by_one() -> None:
    rng = np.random.default_rng(3)
    scores, shares = rng.normal(0, 2, (60, 2)), np.array([0.1, 0.7])

    matched = 1 / (1 + np.exp(-match_label_shares(scores, shares)))

    assert matched.mean(axis=0) == pytest.approx(shares, abs=1e-5)
    added = add_label_shares(np.zeros((1, 2)), shares)
    assert 1 / (1 + np.exp(-added[0])) == pytest.approx(shares)


def test_one_absurd_party_does_not_decide_the_shares() -> None:
    """Among parties that are alike it counts with a part of one party's records."""
    honest = [np.array([30.0, 70.0])] * 9
    share = pooled_share([*honest, np.array([2.0**40, 0.0])])

    believed = 100 * MOST_TIMES_ALIKE * LEAST_PART
    assert share[0] == pytest.approx((270 + believed) / (900 + believed))
    labels = pooled_label_shares([np.array([[30.0], [70.0]])] * 3)
    assert labels == pytest.approx([0.3], abs=0.01)


def test_honest_sizes_are_believed() -> None:
    """Also where the largest party has a hundred times the records of the smallest."""
    sizes = np.array([38, 68, 87, 122, 242, 440, 1032, 1416, 3832, 4723.0])

    assert (believed_sizes(sizes) == sizes).all()
    assert (believed_sizes(np.array([1.0, 100.0, 100.0, 100.0])) == [1, 100, 100, 100]).all()


def test_liars_do_not_vouch_for_each_other() -> None:
    """Two of ten claim the same trillion; neither is believed."""
    believed = believed_sizes(np.array([100.0] * 8 + [1e12] * 2))

    assert believed[8:] == pytest.approx([200.0, 200.0])


# Many parties.


def party(seed: int, num_classes: int = 4) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    counts = np.rint(rng.gamma(0.3, 300, num_classes)) + np.eye(num_classes)[seed % 4]
    return rng.normal(0, 2, (20, num_classes)), counts


@pytest.mark.parametrize("share", ["pooled", "none", (0.4, 0.3, 0.2, 0.1)])
def test_the_order_of_parties_changes_no_bit(share: object) -> None:
    parties = [party(seed) for seed in range(30)]
    results = set()
    for seed in range(5):
        pool = EvidencePool((20, 4), bound=10.0, task="single-label", share=share)  # type: ignore[arg-type]
        for position in np.random.default_rng(seed).permutation(30):
            pool.add(*parties[position], contrast="none" if position % 2 else "public")
        results.add(pool.result().tobytes())

    assert len(results) == 1


def test_classes_may_be_named_in_any_order() -> None:
    parties, order = [party(seed) for seed in range(8)], np.array([2, 0, 3, 1])
    results = []
    for classes in (np.arange(4), order):
        pool = EvidencePool((20, 4), bound=10.0, task="single-label", share="pooled")
        for evidence, counts in parties:
            pool.add(evidence[:, classes], counts[classes], "none")
        results.append(pool.result())

    assert centred(results[1]) == pytest.approx(centred(results[0])[:, order], abs=1e-6)


def test_the_consensus_is_the_weighted_mean() -> None:
    parties = [party(seed) for seed in range(6)]
    consensus = EvidenceConsensus((20, 4), bound=16.0)
    for evidence, counts in parties:
        weights = class_weights_of(counts, contrasted=True)
        consensus.add(evidence, weights, 500.0 + float(counts.max()))

    weights = np.array([np.sqrt(counts) for _, counts in parties])
    evidence = np.array([own for own, _ in parties])
    expected = np.einsum("kc,knc->nc", weights, evidence) / weights.sum(axis=0)
    assert consensus.result() == pytest.approx(expected, abs=1e-5)


def test_skewed_parties_end_at_the_posterior_of_all() -> None:
    """Four parties with opposite class shares know together what pooled data would."""
    rng = np.random.default_rng(4)
    share = np.array([0.5, 0.3, 0.2])
    labels = rng.choice(3, size=4000, p=share)
    x = rng.normal(MEANS[labels], 1)
    priors = np.array([[0.9, 0.1, 0], [0, 0.9, 0.1], [0.1, 0, 0.9], [0.9, 0.05, 0.05]])
    priors = priors * (share / priors.mean(axis=0))
    pool = EvidencePool((4000, 3), bound=16.0, task="single-label", share="pooled")
    for prior in priors:
        counts = np.rint(1e6 * prior)
        pool.add(class_evidence(posterior_logits(x, counts), counts), counts, "none")

    votes = np.array([posterior_logits(x, prior).argmax(axis=1) for prior in priors])
    voted = np.array([np.bincount(row, minlength=3).argmax() for row in votes.T])
    best = (posterior_logits(x, share).argmax(axis=1) == labels).mean()
    reached = (pool.result().argmax(axis=1) == labels).mean()
    assert reached > best - 0.03
    assert (voted == labels).mean() < reached - 0.1


def test_a_claim_of_many_records_is_capped() -> None:
    """One of ten parties that claims 2**40 records weighs no more than a few do."""
    honest, liar = np.full((5, 2), 1.0), np.full((5, 2), -10.0)

    def result(size: float) -> float:
        consensus = EvidenceConsensus((5, 2), bound=16.0)
        for _ in range(9):
            consensus.add(honest, np.full(2, math.sqrt(100.0)), 100.0)
        consensus.add(liar, np.full(2, math.sqrt(size)), size)
        return float(consensus.result()[0, 0])

    def with_weight(weight: float) -> float:
        return (9 - 10 * weight) / (9 + weight)

    most = MOST_TIMES_ALIKE
    assert result(100.0) == pytest.approx(with_weight(1.0), abs=1e-6)
    for size in (2.0**40, 1.9 * 2.0**39, 1e5):
        assert with_weight(math.sqrt(2 * most)) <= result(size) + 1e-6
        assert result(size) - 1e-6 <= with_weight(math.sqrt(most))


def test_a_size_within_reason_counts_in_full() -> None:
    """The cut begins above what the smaller parties make plausible."""
    consensus = EvidenceConsensus((1, 1), bound=4.0)
    for size in (100.0, 100.0, 100.0, 190.0):
        consensus.add(np.full((1, 1), size / 190), np.full(1, math.sqrt(size)), size)

    weights = np.sqrt([100, 100, 100, 190])
    expected = weights @ np.array([100, 100, 100, 190]) / 190 / weights.sum()
    assert consensus.result()[0, 0] == pytest.approx(expected, abs=1e-6)


def test_memory_does_not_grow_with_the_parties() -> None:
    """A thousand parties of sizes from 1 to 2**40 are kept as at most 42 sums."""
    consensus = EvidenceConsensus((3, 2), bound=4.0)
    for number in range(1000):
        size = 2.0 ** (number % 41)
        consensus.add(np.ones((3, 2)), np.full(2, math.sqrt(size)), size)

    assert len(consensus._sums) <= 42
    assert consensus.result() == pytest.approx(np.ones((3, 2)))


def test_shares_are_matched_if_most_parties_compare_classes_only_with_each_other() -> None:
    """Then, and only then: other evidence is relative to the public rows already."""
    rules = []
    for plain in (5, 6):
        pool = EvidencePool((20, 4), bound=10.0, task="single-label", share="auto")
        for seed in range(10):
            pool.add(*party(seed), contrast="none" if seed < plain else "uncovered")
        rules.append(pool.rule)

    assert rules == ["none", "pooled"]


def test_class_shares_may_be_given_as_text() -> None:
    assert read_class_share("X", "0.25, 0.75", 2, "single-label") == (0.25, 0.75)
    assert read_class_share("X", "pooled", 2, "single-label") == "pooled"
    with pytest.raises(InvalidData, match="2 numbers that sum to 1"):
        read_class_share("X", "0.25,0.7", 2, "single-label")
    with pytest.raises(InvalidParameter, match="one of auto, pooled, none, or 2 numbers"):
        read_class_share("X", "halves", 2, "single-label")
    with pytest.raises(InvalidParameter, match="2 numbers between 0 and 1"):
        read_class_share("X", (0.5, 1.0), 2, "multi-label")


@given(
    labels=st.lists(st.integers(-1, 4), min_size=1, max_size=9),
    held=st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_votes_as_evidence_by_their_definition(labels: list[int], held: list[int]) -> None:
    """One number for the class that is named and one for all others, to the bit."""
    counts, said = np.array(held, dtype=np.float64), np.array(labels)
    seen = counts > 0
    votes = (said[:, None] == np.arange(5)) & seen
    mean = votes.sum(axis=1, keepdims=True) / max(int(seen.sum()), 1)
    expected = np.where(seen, 6.0 * (votes - mean), 0.0)

    assert vote_evidence(said, counts).tobytes() == expected.tobytes()


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 50.0, 51.0, 900.0, 1e12]), min_size=1))
def test_believed_sizes_by_their_definition(claimed: list[float]) -> None:
    """From the smallest on, each up to ten times the mean of smaller ones, or four medians."""
    sizes = np.array(claimed)
    granted: dict[float, float] = {}
    for size in sorted({*claimed}):
        smaller = [granted[other] for other in claimed if other < size]
        most = max(10 * sum(smaller) / len(smaller), 4 * np.median(sizes)) if smaller else size
        granted[size] = min(size, most)
    lower, middle = (max(float(np.quantile(sizes, q)), 1.0) for q in (0.25, 0.5))
    likely = middle * max(2.0, (middle / lower) ** 3)
    expected = [min(granted[size], likely) for size in claimed]

    np.testing.assert_allclose(believed_sizes(sizes), expected, rtol=1e-12)


# One party's influence.


def limited(values: FloatArray, weights: FloatArray) -> FloatArray:
    return limited_mean(lambda k, rows: values[k, rows], weights, values.shape[1])


def test_one_party_moves_a_row_by_its_weight_at_most() -> None:
    """Whatever it sends: by its share of the width, and by a place of the median."""
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(10, 200, 3)), np.ones((10, 3))
    before = limited(values[:9], weights[:9])
    ordered = np.sort(values[:9], axis=0)
    places = np.maximum(ordered[5] - ordered[4], ordered[4] - ordered[3])
    for lie in (-1e6, -10.0, 10.0, 1e6):
        attacked = limited(np.concatenate([values[:9], np.full((1, 200, 3), lie)]), weights)
        assert (np.abs(attacked - before) <= places + 0.2).all()


def test_parties_close_to_each_other_have_the_plain_mean() -> None:
    rng = np.random.default_rng(1)
    values, weights = rng.uniform(-0.4, 0.4, (7, 50, 4)), rng.uniform(0, 5, (7, 4))

    plain = np.einsum("knc,kc->nc", values, weights) / weights.sum(axis=0)

    assert limited(values, weights) == pytest.approx(plain)


def test_who_alone_knows_a_class_is_not_cut() -> None:
    """Others have no opinion, and hardly any weight."""
    values = np.zeros((10, 5, 1))
    values[3] = 8.0
    weights = np.full((10, 1), 0.1)
    weights[3] = 10.0

    assert limited(values, weights) == pytest.approx(8 - 0.9 / 10.9 * 1.0)


def test_a_class_that_nobody_knows_has_no_evidence() -> None:
    assert (limited(np.ones((3, 4, 2)), np.zeros((3, 2))) == 0).all()


def test_many_rows_are_combined_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values, weights = np.random.default_rng(2).normal(size=(6, 40, 3)), np.ones((6, 3))
    whole = limited(values, weights)
    monkeypatch.setattr("fl_strategies.aggregation.evidence._MOST_CELLS", 100)

    assert (limited(values, weights) == whole).all()


def test_a_claim_of_one_class_is_compared_with_the_runner_up() -> None:
    """As many records of a class as of all would triple the weight on it."""
    counts = np.full((10, 10), 20.0)
    counts[4, 7] = 2.0**40

    believed = believed_counts(counts)

    assert believed[4, 7] == 40
    assert (np.delete(believed.ravel(), 47) == 20).all()


def test_liars_do_not_vouch_for_each_others_classes() -> None:
    """Three of ten claim a class together, which no runner-up would give away."""
    counts = np.full((10, 10), 20.0)
    counts[:3, 7] = 400.0

    assert (believed_counts(counts)[:3, 7] == 40).all()


def test_where_parties_differ_the_runner_up_is_what_a_claim_is_compared_with() -> None:
    """Shares from 10 to 90 percent; one has five times as many as the next."""
    shares = np.linspace(0.1, 0.9, 10)
    counts = 100 * np.stack([shares, 1 - shares], axis=1)
    counts[0, 1] = 450.0

    believed = believed_counts(counts)

    assert not are_alike(counts)
    assert believed[0, 1] == pytest.approx(2 * 100 * (1 - shares[1]))
    assert (believed.ravel()[2:] == counts.ravel()[2:]).all()


def test_the_only_one_that_knows_a_class_is_believed() -> None:
    """Nine parties have one record of it or none, and the others' classes differ."""
    counts = np.array([[50.0, 2.0, 0.0], [2.0, 50.0, 0.0]] * 5)
    counts[:, 2] = [0, 1, 0, 1, 0, 1, 0, 0, 80, 1]

    assert (believed_counts(counts) == counts).all()
    assert (believed_counts(counts[:4]) == counts[:4]).all()


@pytest.mark.parametrize("share", [[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]])
def test_public_rows_correct_a_false_claim_of_records(share: list[float]) -> None:
    """Exact evidence of two normal densities; a liar claims all records of one class.

    Evidence is divided by the sharpness that a mean of parties is taken to need.
    """
    rng = np.random.default_rng(3)
    labels = rng.random(20_000) < share[1]
    x = rng.normal(np.where(labels, 2.0, -2.0))
    densities = np.stack([-((x + 2) ** 2) / 2, -((x - 2) ** 2) / 2], axis=1)
    scores = densities / SHARPNESS
    counts = np.array([[100.0 * share[0], 100.0 * share[1]]] * 9)
    honest = likely_share(scores, counts)
    lied = likely_share(scores, np.concatenate([counts, [[0.0, 150.0]]]))

    assert honest == pytest.approx(share, abs=0.01)
    assert 0 < lied[1] - honest[1] < 0.08
    pooled = pooled_share(np.concatenate([counts, [[0.0, 150.0]]]))
    assert lied[1] - honest[1] < 0.6 * (pooled[1] - share[1])


def test_records_are_counted_per_class_and_known_positives_per_label() -> None:
    assert class_counts(np.array([2, 0, 2]), 4, "single-label").tolist() == [1, 0, 2, 0]
    y = np.array([[1, -1, 0], [1, 1, 0]])
    assert class_counts(y, 3, "multi-label").tolist() == [2, 1, 0]


@given(hnp.arrays(np.float64, (4, 6), elements=st.floats(0, 1e9)))
def test_weights_are_shares(counts: np.ndarray) -> None:
    weights = class_weights(list(counts), 6)

    assert (weights >= 0).all()
    assert weights.sum(axis=0) == pytest.approx(np.ones(6))


def test_classes_without_counts_are_weighted_uniformly() -> None:
    weights = class_weights([np.array([4.0, 0.0]), np.array([0.0, 0.0])], 2)

    assert weights.tolist() == [[1.0, 0.5], [0.0, 0.5]]
    assert (class_weights([None, None, None, None], 2) == 0.25).all()


@pytest.mark.parametrize(
    "counts",
    [
        np.ones(2),
        np.ones(3, np.float32),
        np.ones((3, 1)),
        *(np.array([1.0, impossible, 1.0]) for impossible in (np.nan, -1.0, np.inf, 1e20)),
    ],
)
def test_impossible_counts_are_refused(counts: np.ndarray) -> None:
    with pytest.raises(KnowledgeMismatch, match="class-counts must be"):
        read_counts({CLASS_COUNTS: counts}, 3)
    with pytest.raises(KnowledgeMismatch, match="class-counts must be"):
        read_counts({}, 3)


def test_the_mean_weighs_each_class_by_itself() -> None:
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    parties = [np.full((3, 2), 2.0), np.full((3, 2), -4.0)]

    mean = weighted_mean(parties, weights, PlainScores(bound=9.0))

    assert mean.tolist() == [[2.0, -4.0]] * 3


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_little_noise_leaves_the_mean(noise: str) -> None:
    rng = np.random.default_rng(0)
    form = Quantizer(num_levels=200, bound=3.0)
    parties = [form.encode(rng.uniform(-1, 1, (50, 4))) for _ in range(5)]
    weights = class_weights([rng.uniform(0, 9, 4) for _ in parties], 4)
    strength = {"gamma": 1e4} if noise == "laplace" else {"sigma": 1e-4}
    privacy = ScorePrivacy(noise=noise, **strength)  # type: ignore[arg-type]
    mechanism = privacy.mechanism(
        unit="party", bound=15.0, num_values=4, num_contributors=5, num_rows=50
    )

    noisy = noisy_weighted_mean(parties, weights, form, mechanism, None)

    plain = weighted_mean(parties, weights, form)
    assert 1e-6 < np.abs(noisy - plain).max() < 5e-3


def test_noise_has_the_scale_it_says() -> None:
    """The mean distance of Laplace noise from 0 is its scale, whatever the weights."""
    form = PlainScores(bound=1.0)
    parties, weights = [np.zeros((2000, 3))] * 4, np.full((4, 3), 0.25)
    privacy = ScorePrivacy(gamma=0.5)
    mechanism = privacy.mechanism(
        unit="party", bound=1.0, num_values=3, num_contributors=4, num_rows=2000
    )

    noise = noisy_weighted_mean(parties, weights, form, mechanism, None)

    # 6000 draws: the mean has a deviation of 2 / sqrt(6000) = 0.026.
    assert abs(np.abs(noise).mean() - 2.0) < 0.13
    assert len(np.unique(noise)) > 5900
