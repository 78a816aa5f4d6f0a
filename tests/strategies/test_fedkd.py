"""FedKD: what leaves a party, how it is combined, and what is learned from it."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from scipy.special import softmax

from clients.app import FAILED, client_app
from fl_strategies import FedKD, FedKDOptions, FedKDParty, Party
from fl_strategies._util import FloatArray
from fl_strategies.aggregation.votes import CLASS_COUNTS
from fl_strategies.errors import (
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    RunFailed,
    UnsupportedLearner,
)
from fl_strategies.learners import Recipe
from fl_strategies.party.role import PartyState
from fl_strategies.strategies.fedkd import server
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Quantizer
from simulations.runtime.local import InMemoryGrid, run_local
from tests.toys import (
    PUBLIC,
    PUBLIC_LABELS,
    TEST,
    CentroidLearner,
    EditedGrid,
    WatchedGrid,
    accuracy,
    load_toy_party,
    load_with,
    toy_fedkd,
    toy_party,
    watched,
    with_arrays,
)

NUM_PARTIES = 4
APP = client_app(load_toy_party)
NOISY = {"weights": "uniform", "gamma": 1.0}
FLOATS: dict[str, object] = {"num_levels": None}
SCALE: dict[str, object] = {"scale": "max", "weights": "counts"}


def app_of(**changes: Any) -> Any:
    """Return an app of toy parties that are changed alike."""
    return client_app(lambda context: replace(load_toy_party(context), **changes))


class Recording(CentroidLearner):
    """Keeps what it was asked to learn."""

    rows: FloatArray
    targets: FloatArray
    recipe: Recipe

    def distill(self, x: Any, targets: Any, *, rng: Any, recipe: Recipe) -> Any:
        self.rows, self.targets, self.recipe = x, targets, recipe
        return super().distill(x, targets, rng=rng, recipe=recipe)


def run(strategy: FedKD, app: Any = APP, num_rounds: int = 1) -> Recording:
    run_local(strategy, app, NUM_PARTIES, num_rounds=num_rounds)
    return strategy.model_  # type: ignore[return-value]


def recorded(**changes: object) -> FedKD:
    """Return the paper's FedKD, which learns scores by their absolute error."""
    return toy_fedkd(learner_fn=Recording, **{"weights": "counts", "loss": "l1", **changes})


def own_logits(partition_id: int, seed: int = 0) -> FloatArray:
    """Compute again what a party's model says about the public rows, centred."""
    party = toy_party(partition_id)
    model = CentroidLearner().fit(party.x, party.y, rng=party.rng(seed, "model"))
    logits = model.logits(PUBLIC)
    return logits - logits.mean(axis=1, keepdims=True)


def own_counts(partition_id: int) -> FloatArray:
    return np.bincount(toy_party(partition_id).y, minlength=3).astype(float)


def test_the_scores_are_equation_two_without_noise() -> None:
    """Counts weigh the quantized logits class by class, recomputed here by hand."""
    model = run(recorded())

    quantizer = Quantizer(num_levels=200, bound=10.0)
    parts = [quantizer.decode(quantizer.encode(own_logits(i))) for i in range(NUM_PARTIES)]
    counts = np.stack([own_counts(i) for i in range(NUM_PARTIES)])
    expected = np.einsum("kc,knc->nc", counts / counts.sum(axis=0), np.stack(parts))
    assert model.targets == pytest.approx(expected)
    assert (model.rows == PUBLIC).all()
    assert model.recipe == Recipe(loss="l1")


def test_uniform_weights_are_the_plain_mean() -> None:
    """Without counts on the wire, every party weighs the same."""
    model = run(recorded(weights="uniform", num_levels=None))

    expected = np.mean([np.clip(own_logits(i), -10, 10) for i in range(NUM_PARTIES)], axis=0)
    assert model.targets == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_a_robust_rule_ignores_one_liar(rule: str) -> None:
    """One of four parties sends the worst scores it can; the middle two decide."""
    options: dict[str, object] = {"weights": "uniform", "num_levels": None}

    class Liar(CentroidLearner):
        def logits(self, x: Any) -> Any:
            return -1e6 * super().logits(x)

    app = client_app(load_with(lambda party: replace(party, learner_fn=Liar), only=2))
    robust, plain = (run(recorded(**options, consensus=c), app) for c in (rule, "mean"))

    lies = np.clip(-1e6 * own_logits(2), -10, 10)
    said = [lies if i == 2 else np.clip(own_logits(i), -10, 10) for i in range(NUM_PARTIES)]
    assert robust.targets == pytest.approx(np.sort(said, axis=0)[1:3].mean(axis=0), abs=1e-5)
    honest = np.mean([own_logits(i) for i in (0, 1, 3)], axis=0).argmax(axis=1)
    agreement = [(m.targets.argmax(axis=1) == honest).mean() for m in (robust, plain)]
    assert agreement[0] > 0.95 > agreement[1]


def test_noise_is_drawn_once() -> None:
    """The student sees one noisy score per row and class; two runs differ by fresh noise."""
    quiet, first, second = (
        run(recorded(weights="uniform", **noise))
        for noise in ({}, {"gamma": 2.0}, {"gamma": 2.0})
    )

    noise = first.targets - quiet.targets
    assert noise.shape == (60, 3)
    # 180 draws of Laplace(1/2): the mean distance has a deviation of 0.037.
    assert 0.3 < np.abs(noise).mean() < 0.7
    assert (first.targets != second.targets).all()


def test_seeded_noise_repeats() -> None:
    """For simulations the noise may come from the seed."""
    noisy = {"weights": "noisy-counts", "gamma": 1.0, "seeded_noise": True}
    first, second, other = (run(recorded(seed=seed, **noisy)) for seed in (0, 0, 1))

    assert (first.targets == second.targets).all()
    assert (first.targets != other.targets).any()


def test_the_largest_logit_of_all_parties_is_the_scale() -> None:
    """With scale="max" a first round finds the bound and a second brings the scores."""
    strategy, fitted = recorded(scale="max", weights="uniform"), list[Any]()
    model = run(strategy, app_of(learner_fn=watched(CentroidLearner, fitted)), num_rounds=3)

    largest = max(np.abs(own_logits(i)).max() for i in range(NUM_PARTIES))
    assert strategy.bound_ == largest
    step = 2 * largest / 199
    plain = np.mean([own_logits(i) for i in range(NUM_PARTIES)], axis=0)
    assert np.abs(model.targets - plain).max() <= step / 2
    assert strategy.round_ == 2
    assert len(fitted) == NUM_PARTIES, "logits of the first round are kept for the second"


def test_one_round_is_not_enough_for_the_largest_logit() -> None:
    """The run says that it has no model yet, and a second start continues."""
    strategy = recorded(scale="max")
    grid = InMemoryGrid(APP, NUM_PARTIES)
    with pytest.raises(RunFailed, match="the scale is known and the scores are not"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
    with pytest.raises(NotFitted, match="the scale is known and the scores are not"):
        strategy.model_  # noqa: B018

    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.model_


def test_one_absurd_scale_does_not_widen_everybody_s_steps() -> None:
    """A party that states a million is believed up to ten times the median."""
    strategy = recorded(scale="max")
    with pytest.raises(RunFailed, match="run a second round"):
        strategy.start(tampered({"scale": np.array([1e6])}), ArrayRecord(), num_rounds=1)

    honest = [np.abs(own_logits(i)).max() for i in range(1, NUM_PARTIES)]
    assert strategy.bound_ == 10 * np.median([1e6, *honest])


def test_a_failed_first_round_is_asked_again() -> None:
    """The scale may come late; the scores follow in the round after it."""
    strategy = recorded(scale="max")
    grid = EditedGrid(APP, NUM_PARTIES, lambda n, replies: [] if n == 1 else replies)
    strategy.start(grid, ArrayRecord(), num_rounds=4)

    assert strategy.model_
    assert strategy.round_ == 3


def test_logits_of_an_earlier_request_are_not_used_again() -> None:
    """A second run on the same nodes with another seed gives other logits."""
    grid = InMemoryGrid(APP, NUM_PARTIES)
    targets = []
    for seed in (0, 1):
        strategy = recorded(scale="max", weights="uniform", seed=seed)
        strategy.start(grid, ArrayRecord(), num_rounds=2)
        targets.append(strategy.model_.targets)

    assert (targets[0] != targets[1]).any()


def test_a_server_cannot_ask_for_endless_predictions() -> None:
    """What a party sends has a limit of its own."""
    config = {**recorded().party_config(), keys.SEED: 0, "num-predictions": 2**20}
    asked = ConfigRecord({**config, "augmentation": "crop"})

    with pytest.raises(KnowledgeMismatch, match="num-predictions must be at most 372827"):
        FedKDParty().train(toy_party(0), None, asked, PartyState())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"loss": "l2"}, Recipe(loss="l2")),
        ({"loss": "mse", "distill_epochs": 3}, Recipe(loss="mse", epochs=3)),
        (
            {"loss": "kl", "temperature": 3.0},
            Recipe(loss="cross-entropy", link="softmax", temperature=3.0),
        ),
    ],
)
def test_losses_become_recipes(loss: dict[str, object], expected: Recipe) -> None:
    """A norm matches logits; a divergence matches probabilities at its temperature."""
    model = run(recorded(**loss))

    assert model.recipe == expected
    if expected.link == "softmax":
        plain = run(recorded())
        assert model.targets == pytest.approx(softmax(plain.targets / 3.0, axis=1))


def test_parties_may_lack_classes() -> None:
    """A class that one party lacks is decided by the others, and one that all lack is dull."""

    def without_last(context: Context) -> Party:
        party = load_toy_party(context)
        rows = party.y < 2
        return replace(party, x=party.x[rows], y=party.y[rows])

    model = run(recorded(), client_app(without_last))

    assert np.isfinite(model.targets).all()
    assert (model.targets.argmax(axis=1) < 2).all()


def test_public_labels_join_the_training() -> None:
    """Parties that hold labels of the public rows train on both."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        few = replace(party, x=party.x[:2], y=party.y[:2])
        return replace(few, public_y=PUBLIC_LABELS)

    alone, helped = (
        run(recorded(public_labels=use), client_app(load)) for use in (False, True)
    )

    assert accuracy(helped.predict(TEST[0])) > accuracy(alone.predict(TEST[0]))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"public_labels": True}, "public_y must be given to train"),
        ({"task": "multi-label"}, "task must be one of single-label"),
    ],
)
def test_parties_of_another_task_or_without_public_labels_take_no_part(
    settings: dict[str, Any], reason: str
) -> None:
    """Each says so."""
    strategy = toy_fedkd(**settings)
    with pytest.raises(RunFailed):
        run_local(strategy, APP, NUM_PARTIES)

    assert all(reason in why for why in strategy.rejected_.values())
    assert len(strategy.rejected_) == NUM_PARTIES


class FlatRecording(Recording):
    """Sees images as flat rows."""

    def fit(self, x: Any, y: Any, *, rng: Any) -> Any:
        return super().fit(x.reshape(len(x), -1), y, rng=rng)

    def distill(self, x: Any, targets: Any, *, rng: Any, recipe: Recipe) -> Any:
        return super().distill(x.reshape(len(x), -1), targets, rng=rng, recipe=recipe)

    def logits(self, x: Any) -> Any:
        return super().logits(x.reshape(len(x), -1))


def test_repeated_predictions_are_all_learned_from() -> None:
    """Three predictions a row give three times the rows, each with its own scores."""
    images = {"public": PUBLIC.reshape(-1, 1, 1, 2), "learner_fn": FlatRecording}

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        x = party.x.reshape(-1, 1, 1, 2)
        return replace(party, x=x, x_test=None, y_test=None, **images)

    strategy = toy_fedkd(**images, num_predictions=3, augmentation="crop", evaluate=False)
    model = run(strategy, client_app(load))

    assert model.rows.shape == (180, 2)
    assert model.targets.shape == (180, 3)
    assert (model.rows[:60] == PUBLIC).all()
    assert (model.rows[60:120] != model.rows[120:]).any()


def tampered(arrays: dict[str, np.ndarray]) -> WatchedGrid:
    """Return a grid on which one party sends something else."""
    return WatchedGrid(APP, NUM_PARTIES, with_arrays(lambda held: held | arrays))


@pytest.mark.parametrize(
    ("options", "arrays", "reason"),
    [
        ({}, {"scores": np.zeros(179, np.uint8)}, "must be 180 bytes"),
        ({}, {"scores": np.zeros(240, np.uint8)}, "must be 180 bytes"),
        ({}, {"scores": np.full(180, 255, np.uint8)}, "values must be below 200, got 255"),
        ({}, {CLASS_COUNTS: np.zeros(4)}, r"class-counts must be \(3,\) numbers"),
        ({}, {CLASS_COUNTS: np.full(3, np.nan)}, "class-counts must be from 0"),
        (FLOATS, {"scores": np.full((60, 3), np.nan, np.float32)}, "logits must be finite"),
        (FLOATS, {"scores": np.zeros((60, 4), np.float32)}, r"float32 of shape \(60, 3\)"),
        (SCALE, {"scale": np.zeros(1)}, "the largest logit must be one"),
        (SCALE, {"scale": np.array([1e300])}, "the largest logit must be one"),
        (SCALE, {"scale": np.array([np.nan])}, "the largest logit must be one"),
    ],
)
def test_one_bad_party_is_left_out_and_the_rest_goes_on(
    options: dict[str, object], arrays: dict[str, np.ndarray], reason: str
) -> None:
    """One clear line names the party's fault; three others make the model."""
    strategy = toy_fedkd(**options)
    scale_first = pytest.raises(RunFailed, match="run a second round")
    with scale_first if options.get("scale") == "max" else nullcontext():
        strategy.start(tampered(arrays), ArrayRecord(), num_rounds=1)

    (why,) = strategy.rejected_.values()
    assert re.search(reason, why)
    assert strategy.state.history["train"][1][keys.NUM_PARTIES] == 3


def test_a_party_with_a_broken_model_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """NaN logits never leave."""

    class Broken(CentroidLearner):
        def logits(self, x: Any) -> Any:
            return np.full((len(x), 3), np.nan)

    strategy = toy_fedkd()
    broken = load_with(lambda party: replace(party, learner_fn=Broken), only=1)
    run_local(strategy, client_app(broken), NUM_PARTIES)

    (why,) = strategy.rejected_.values()
    assert why == FAILED
    assert "Party 1: logits must be finite, got NaN or infinity." in caplog.text
    assert strategy.model_


def test_levels_take_an_eighth_of_float64() -> None:
    """Measured on the encoded messages of 5000 rows x 10 classes at S = 200."""
    public = np.random.default_rng(0).normal(size=(5000, 2))

    class Ten(CentroidLearner):
        num_classes = 10

        def logits(self, x: Any) -> Any:
            return np.tile(super().logits(x), (1, 4))[:, :10]

    app = app_of(public=public, num_classes=10, learner_fn=Ten, x_test=None, y_test=None)
    strategy = toy_fedkd(public=public, num_classes=10, learner_fn=Ten, evaluate=False)
    result = run_local(strategy, app, NUM_PARTIES)

    sent = result.train_metrics_clientapp[1][keys.NUM_BYTES_SENT]
    assert NUM_PARTIES * 5000 * 10 * 8 / sent >= 7.9


SPENT_ON_COUNTS = {"weights": "noisy-counts", "target_epsilon": 1.0, "count_epsilon": 1.0}


@pytest.mark.parametrize(
    ("make", "changes", "rule"),
    [
        (toy_fedkd, {"num_levels": 1}, "num_levels must be from 2"),
        (
            toy_fedkd,
            {"clip": 0.0},
            "clip must be greater than 0 and at most 1000000.0, got 0.0",
        ),
        (toy_fedkd, {"scale": "mean"}, "scale must be one of clip, max"),
        (
            toy_fedkd,
            {"weights": "none"},
            "weights must be one of evidence, noisy-evidence, counts, noi",
        ),
        (toy_fedkd, {"loss": "hinge"}, "loss must be one of l1, l2, mse, kl"),
        (toy_fedkd, {"temperature": -1.0}, "temperature must be greater than 0, got -1.0"),
        (
            toy_fedkd,
            {"loss": "l1", "temperature": 3.0},
            "temperature must be omitted unless loss is 'kl'",
        ),
        (toy_fedkd, {"num_predictions": 2}, "augmentation must be given"),
        (
            toy_fedkd,
            {"task": "regression", "weights": "noisy-counts"},
            "noise must be none for numeric targets, for which fedmoments has some",
        ),
        (toy_fedkd, {"weights": "uniform", "gamma": -1.0}, "gamma must be greater than 0"),
        (toy_fedkd, {"gamma": 1.0}, "weights must be 'uniform' or 'noisy-counts' with noise"),
        (toy_fedkd, {"scale": "max"}, "scale must be 'clip' with evidence"),
        (
            toy_fedkd,
            {"class_share": "half"},
            "class_share must be one of auto, pooled, none, or 3",
        ),
        (toy_fedkd, {"weights": "noisy-counts", "count_epsilon": 0.0}, "epsilon must be"),
        (
            toy_fedkd,
            {"rounding": "down"},
            "rounding must be one of nearest, stochastic, got 'down'",
        ),
        (
            toy_fedkd,
            {"consensus": "class-weighted"},
            "consensus must be one of mean, median, trimmed",
        ),
        (
            toy_fedkd,
            {"consensus": "median"},
            "consensus must be mean unless weights are uniform",
        ),
        (
            toy_fedkd,
            {**NOISY, "consensus": "median"},
            "consensus must be mean unless .* without noise",
        ),
        (toy_fedkd, {"trim_fraction": 0.5}, "trim_fraction must be at least 0 and below 0.5"),
        (toy_fedkd, SPENT_ON_COUNTS, "count_epsilon must be below target_epsilon"),
        (FedKDOptions, {"num_levels": 0}, "FedKD: num_levels must be from 2 to"),
        (FedKDOptions, {"temperature": 0.0}, "FedKD: temperature must be greater than 0, got"),
        (FedKDOptions, {"temperature": math.inf}, "FedKD: temperature must be finite, got inf"),
    ],
)
def test_bad_parameters_are_named(make: Any, changes: dict[str, Any], rule: str) -> None:
    """Before any data moves; None leaves a setting out, and 0 is a number like any other."""
    with pytest.raises(InvalidParameter, match=rule):
        make(**changes)


def test_the_final_model_must_learn_from_scores() -> None:
    """A learner of labels alone is refused in the constructor."""

    class LabelsOnly(CentroidLearner):
        distill = None  # type: ignore[assignment]

    with pytest.raises(UnsupportedLearner, match="must have distill to learn from scores"):
        toy_fedkd(learner_fn=LabelsOnly)


def test_more_noise_costs_accuracy() -> None:
    """Scores drowned in noise teach nothing."""
    accuracies = [
        accuracy(run(recorded(seeded_noise=True, gamma=gamma)).predict(TEST[0]))
        for gamma in (100.0, 0.001)
    ]

    assert accuracies[0] > 0.85 > accuracies[1]
    assert math.isfinite(accuracies[1])


# Many parties.


@pytest.mark.parametrize("weights", ["uniform", "counts"])
def test_scores_of_many_parties_are_summed(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond some number nothing but sums is kept, and the consensus is nearly the same."""
    few = recorded(weights=weights)
    kept = run(few)
    monkeypatch.setattr(server, "MOST_KEPT", 1)
    many = recorded(weights=weights)
    held: list[int] = []
    finish = many.finish

    def watched_finish() -> Any:
        held.append(sum(reply.knowledge.values is not None for reply in many._kept))
        return finish()

    monkeypatch.setattr(many, "finish", watched_finish)
    summed = run(many)

    assert held == [0]
    np.testing.assert_allclose(summed.targets, kept.targets, rtol=0, atol=1e-9)


def test_medians_and_noise_need_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums are not enough everything is kept, whatever the number of parties."""
    settings: list[dict[str, object]] = [
        {"weights": "uniform", "consensus": "median"},
        {"weights": "uniform", "gamma": 5.0, "seeded_noise": True},
    ]
    for changes in settings:
        kept = run(recorded(**changes))
        with monkeypatch.context() as patch:
            patch.setattr(server, "MOST_KEPT", 1)
            assert run(recorded(**changes)).targets.tobytes() == kept.targets.tobytes()
