"""DPTorchLearner: what is clipped, noised, drawn and accounted for, seen from outside."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from opacus.layers import DPLSTM
from scipy import stats
from scipy.special import expit, log_softmax, softmax
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from clients.checks import check_learner
from clients.networks import private as dp_sgd
from clients.networks.learner import TorchLearner
from clients.networks.private import DPTorchLearner, calibrated_noise
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.learners import (
    EnsembleLearner,
    IncrementalLearner,
    PortableLearner,
    Recipe,
    SoftLearner,
    fit_ensemble,
)
from fl_strategies.party.party import Party
from fl_strategies.privacy.accountant import claim
from fl_strategies.privacy.bounds.distributions import dpsgd_epsilon
from fl_strategies.privacy.events import DPSGDEvent, event_from_json, event_to_json
from fl_strategies.strategies.fedkt.party import teacher_votes, train_teachers
from tests.clients.digits import X, Y, generator
from tests.clients.networks import (
    flat,
    perceptron,
)

ALMOST_NONE = 1e-6
SHARES: Array = np.random.default_rng(1).dirichlet(np.ones(10), size=100)


def linear() -> nn.Module:
    return nn.Linear(64, 10)


def silent() -> nn.Module:
    """Give 5000 weights that start at 0 and, for rows of zeros, have no gradient."""
    layer = nn.Linear(500, 10, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def seeded(module_fn: Callable[[], nn.Module] = linear, **settings: Any) -> DPTorchLearner:
    """Return a learner whose every draw comes from the generator it is given."""
    defaults: dict[str, Any] = {"num_classes": 10, "epochs": 1, "secure": False}
    if "target_epsilon" not in settings:
        defaults["noise_multiplier"] = ALMOST_NONE
    return DPTorchLearner(module_fn, **{**defaults, **settings})


def start(module_fn: Callable[[], nn.Module], seed: int) -> Array:
    """Return the parameters before training: what a fit without a step size keeps."""
    learner = seeded(module_fn, learning_rate=1e-30)
    return flat(learner.fit(X[:1], Y[:1], rng=generator(seed)))


def mean_loss(learner: DPTorchLearner) -> float:
    scores = log_softmax(learner.logits(X[:100]), axis=1)
    return float(-scores[np.arange(100), Y[:100]].mean())


def epsilon_of(event: DPSGDEvent, delta: float) -> float:
    noise = event.noise_multiplier
    return dpsgd_epsilon(event.records, event.batch_size, event.steps, noise, delta)


WAYS = ("fit", "partial_fit", "distill")
each_way = pytest.mark.parametrize("way", WAYS)


def train(
    learner: DPTorchLearner, way: str, x: Array, *, seed: int = 0, epochs: int = 1
) -> DPTorchLearner:
    """Learn the rows privately in one of three ways; distilling takes `private_distill`."""
    rng, number = generator(seed), len(x)
    if way == "fit":
        learner.epochs = epochs
        return learner.fit(x, Y[:number], rng=rng)
    if way == "partial_fit":
        return learner.partial_fit(x, Y[:number], rng=rng, epochs=epochs)
    return learner.distill(x, SHARES[:number], rng=rng, recipe=Recipe(epochs=epochs))


@contextmanager
def steps_taken() -> Iterator[list[float]]:
    """Collect the norm of the gradient of every step that any optimizer takes."""
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.cat([g.flatten() for g in gradients if g is not None]).norm()))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield norms
    finally:
        handle.remove()


class Watched(nn.Module):
    """Writes down how many rows each training pass brings."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen.append(len(rows))
        scores: Tensor = self.linear(rows)
        return scores


def test_learns_digits_at_a_moderate_epsilon() -> None:
    """With noise from the operating system most digits are still recognised."""
    learner = DPTorchLearner(
        perceptron, num_classes=10, epochs=20, batch_size=128, noise_multiplier=2.0
    )
    learner.fit(X[:1200], Y[:1200], rng=generator())
    ((event, _),) = learner.privacy_events
    assert epsilon_of(event, 1e-5) < 4.5
    assert (learner.predict(X[1200:]) == Y[1200:]).mean() > 0.75


@pytest.mark.parametrize("distils", [False, True])
def test_more_noise_means_less_knowledge(distils: bool) -> None:
    """The same training with a hundred times the noise learns next to nothing."""
    recipe = Recipe(loss="cross-entropy", link="softmax")
    for noise, least, most in ((0.5, 0.8, 1.0), (50.0, 0.0, 0.4)):
        learner = seeded(epochs=10, noise_multiplier=noise, private_distill=True)
        if distils:
            learner.distill(X[:600], np.eye(10)[Y[:600]], rng=generator(), recipe=recipe)
        else:
            learner.fit(X[:600], Y[:600], rng=generator())
        assert least < (learner.predict(X[1200:]) == Y[1200:]).mean() < most


def test_keeps_the_contract() -> None:
    """The package's own check of learners passes, one-class sets included."""

    def learner_fn() -> DPTorchLearner:
        return seeded(lambda: nn.Linear(5, 3), num_classes=3, noise_multiplier=1.0)

    check_learner(learner_fn)
    for protocol in (EnsembleLearner, SoftLearner, IncrementalLearner, PortableLearner):
        assert isinstance(learner_fn(), protocol)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_fits_fewer_records_than_a_batch(records: int) -> None:
    """Then every record is in every batch, and the event says so."""
    Watched.seen.clear()
    learner = seeded(Watched, epochs=3).fit(X[:records], Y[:records], rng=generator())
    ((event, _),) = learner.privacy_events
    assert (event.records, event.batch_size, event.steps) == (records, records, 3)
    assert Watched.seen[1:] == [records] * 3  # the first pass is the check of the module


def test_many_passes_make_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch too large for the memory is worked off in parts, with one noise."""
    settings: dict[str, Any] = {"batch_size": 50, "noise_multiplier": 1.0, "epochs": 4}
    whole = seeded(**settings).fit(X[:100], Y[:100], rng=generator())
    monkeypatch.setattr(dp_sgd, "GRADIENTS_PER_PASS", 7 * 650)
    with steps_taken() as norms:
        parts = seeded(**settings).fit(X[:100], Y[:100], rng=generator())
    assert len(norms) == 8
    assert np.allclose(flat(whole), flat(parts), atol=1e-5)


def test_weights_decay() -> None:
    """Where there is no gradient, a step takes its share off the parameters."""

    def module_fn() -> nn.Module:
        return nn.Linear(64, 10, bias=False)

    learner = seeded(module_fn, learning_rate=1.0, weight_decay=0.25)
    learner.fit(np.zeros((8, 64)), Y[:8], rng=generator(2))
    assert np.allclose(flat(learner), 0.75 * start(module_fn, 2), atol=1e-5)


def test_agrees_with_gradient_descent_where_nothing_is_clipped() -> None:
    """Without clipping and noise a full batch is one step of plain descent.

    A record with several labels loses the mean over its own known ones.
    """
    several = generator(1).integers(-1, 2, size=(40, 10))
    several[3] = -1  # this record has nothing to say
    before = start(linear, 3)
    scores = X[:40] @ before[:640].reshape(10, 64).T + before[640:]
    known = several != -1
    of_several = (expit(scores) - several) * known
    of_several /= np.maximum(known.sum(axis=1, keepdims=True), 1)
    for labels, task, wrong in (
        (Y[:40], "single-label", softmax(scores, axis=1) - np.eye(10)[Y[:40]]),
        (several, "multi-label", of_several),
    ):
        learner = seeded(task=task, max_grad_norm=1e6, noise_multiplier=1e-12, batch_size=40)
        learner.fit(X[:40], labels, rng=generator(3))
        gradient = np.concatenate([(wrong.T @ X[:40]).ravel(), wrong.sum(axis=0)]) / 40
        assert np.allclose(flat(learner), before - 0.5 * gradient, atol=1e-6)
    assert set(np.unique(learner.predict(X[:40]))) == {0, 1}


@pytest.mark.parametrize("norm", [0.1, 1.0])
def test_one_record_moves_parameters_by_the_clipping_norm(norm: float) -> None:
    """However large its gradient, or wrong its numbers, it gets learning rate times norm."""
    for task, x, y in (
        ("single-label", 1000 * X[:1], Y[:1]),
        ("regression", X[:1], np.full((1, 10), 1e6)),
    ):
        learner = seeded(task=task, max_grad_norm=norm, learning_rate=2.0)
        learner.fit(x, y, rng=generator(1))
        moved = np.linalg.norm(flat(learner) - start(linear, 1))
        assert moved == pytest.approx(2.0 * norm, rel=1e-3)


def test_every_step_is_bounded_by_the_batch() -> None:
    """The sum of clipped gradients, over the expected batch, stays within its bound."""
    Watched.seen.clear()
    with steps_taken() as norms:
        seeded(Watched, max_grad_norm=0.5, batch_size=8, epochs=3).fit(
            100 * X[:80], Y[:80], rng=generator()
        )
    sizes = Watched.seen[1:]
    assert len(norms) == len(sizes) == 30
    assert all(norm <= 0.5 * size / 8 + 1e-4 for norm, size in zip(norms, sizes, strict=True))
    assert max(norms) > 0.1


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=64, max_size=64),
    st.integers(0, 9),
)
def test_no_record_weighs_more_than_any_other(values: list[float], y: int) -> None:
    """Another record in place of one moves a step by at most twice its share."""
    x, labels = X[:20].copy(), Y[:20].copy()
    one = flat(seeded(perceptron).fit(x, labels, rng=generator()))
    x[7], labels[7] = values, y
    other = flat(seeded(perceptron).fit(x, labels, rng=generator()))
    assert np.linalg.norm(one - other) <= 2 * 0.5 / 20 + 1e-5


def test_a_record_that_overflows_is_left_out() -> None:
    """Infinite activations of one record do not become everybody's NaN."""
    x = X[:20].copy()
    x[3] = 3e38
    learner = seeded(perceptron, epochs=3).fit(x, Y[:20], rng=generator())
    assert np.isfinite(flat(learner)).all()
    assert not np.allclose(flat(learner), start(perceptron, 0))


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(("noise", "norm", "batch"), [(1.5, 1.0, 10), (0.7, 3.0, 40)])
def test_noise_has_the_deviation_that_is_accounted(
    secure: bool, noise: float, norm: float, batch: int
) -> None:
    """Where there is no gradient, one step is the noise itself, and it is Gaussian."""
    learner = seeded(
        silent,
        noise_multiplier=noise,
        max_grad_norm=norm,
        batch_size=batch,
        learning_rate=1.0,
        secure=secure,
    )
    learner.fit(np.zeros((batch, 500)), Y[:batch], rng=generator())
    scaled = flat(learner) / (noise * norm / batch)
    assert scaled.std() == pytest.approx(1.0, rel=0.05)
    assert stats.kstest(scaled, "norm").pvalue > 1e-6


@pytest.mark.parametrize("secure", [True, False])
@each_way
def test_training_is_the_event_that_it_adds(way: str, secure: bool) -> None:
    """Where there is no gradient, weights move by independent noise of its steps alone."""
    learner = seeded(
        silent,
        private_distill=True,
        noise_multiplier=1.5,
        max_grad_norm=2.0,
        learning_rate=1.0,
        batch_size=8,
        secure=secure,
    )
    assert learner.privacy_events == ()
    with steps_taken() as norms:
        train(learner, way, np.zeros((32, 500)), epochs=4)
    expected = DPSGDEvent(
        noise_multiplier=1.5, records=32, batch_size=8, steps=16, seeded=not secure
    )
    assert learner.privacy_events == ((expected, 1),)
    assert len(norms) == 16
    assert (expected.unit, expected.relation) == ("example", "add-remove-one")
    assert event_from_json(event_to_json(learner.privacy_events[0][0])) == expected
    assert flat(learner).std() == pytest.approx(4 * 1.5 * 2.0 / 8, rel=0.05)


def test_noise_is_not_the_experiment_seed() -> None:
    """Unless told otherwise, equal seeds give models that differ by noise and nothing else."""
    learner = DPTorchLearner(silent, num_classes=10, epochs=1, noise_multiplier=1.0)
    assert learner.secure
    rows = np.zeros((32, 500))
    one, other = (flat(copy.copy(learner).fit(rows, Y[:32], rng=generator())) for _ in "ab")
    assert (one != other).mean() > 0.99
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


def test_noise_is_the_only_secret() -> None:
    """The first parameters come from the experiment's generator all the same."""
    full: dict[str, Any] = {"batch_size": 64, "noise_multiplier": 1e-9}
    secret = seeded(perceptron, secure=True, **full).fit(X[:50], Y[:50], rng=generator(5))
    known = seeded(perceptron, **full).fit(X[:50], Y[:50], rng=generator(5))
    assert np.allclose(flat(secret), flat(known), atol=1e-6)


def test_noise_is_reproducible_when_seeded() -> None:
    """Without `secure` equal generators give equal bits, dropout included."""

    def module_fn() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    def fit(seed: int) -> Array:
        learner = seeded(module_fn, noise_multiplier=1.0, epochs=2)
        return flat(learner.fit(X[:100], Y[:100], rng=generator(seed)))

    assert np.array_equal(fit(1), fit(1))
    assert not np.array_equal(fit(1), fit(2))


def test_dropout_is_secret_as_well() -> None:
    """Known masks would let one record change what the others of its batch say."""

    def module_fn() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    learner = seeded(module_fn, secure=True)
    one, other = (flat(copy.copy(learner).fit(X[:20], Y[:20], rng=generator())) for _ in "ab")
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("secure", [True, False])
def test_fit_leaves_global_random_states_alone(secure: bool) -> None:
    """PyTorch's generator and number of threads are after a fit what they were."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    seeded(perceptron, secure=secure).fit(X[:50], Y[:50], rng=generator())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_noise_has_no_low_bits() -> None:
    """A noised sum is a whole number of units, whatever was noised."""
    learner = seeded(silent, noise_multiplier=0.5, learning_rate=1.0)
    learner.fit(np.zeros((32, 500)), Y[:32], rng=generator())
    units = flat(learner).astype(float) * 32 / 0.5 * 2**24
    small = np.abs(units) < 2**24  # others have lost bits as float32 anyway
    assert 0.6 < small.mean() < 0.75
    assert np.array_equal(units[small], np.rint(units[small]))


def test_dropout_starts_from_more_than_32_bits() -> None:
    """PyTorch's generator runs through exactly the words that the system gave."""
    state = dp_sgd.unpredictable_state()
    words = state[24 : 24 + 624 * 8].numpy().copy().view(np.uint64)
    twister = np.random.MT19937()
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": words.astype(np.uint32), "pos": 624},
    }
    source = torch.Generator().set_state(state)
    drawn = torch.randint(2**20, (1000,), generator=source)
    raw = twister.random_raw(1000) % 2**20
    assert np.array_equal(drawn.numpy(), raw)
    other = dp_sgd.unpredictable_state()[24 : 24 + 624 * 8].numpy()
    assert (words != other.copy().view(np.uint64)).mean() > 0.99


@pytest.mark.parametrize("secure", [True, False])
@each_way
def test_batches_are_poisson_samples(way: str, secure: bool) -> None:
    """Batch sizes have the mean and variance of independent draws of every record."""
    Watched.seen.clear()
    learner = seeded(Watched, private_distill=True, batch_size=20, secure=secure)
    train(learner, way, X[:100], epochs=80)
    sizes = np.array(Watched.seen[1:])
    assert len(sizes) == 400
    assert sizes.mean() == pytest.approx(20, abs=1.2)  # 6 standard errors
    assert sizes.var() == pytest.approx(16, rel=0.45)


@pytest.mark.parametrize(("records", "batch"), [(100, 32), (96, 32), (97, 32), (7, 1), (50, 1)])
def test_accounted_steps_are_taken(records: int, batch: int) -> None:
    """The event counts neither fewer nor more than the optimizer takes, also on no record."""
    Watched.seen.clear()
    learner = seeded(Watched, batch_size=batch, epochs=2, noise_multiplier=1.0)
    with steps_taken() as norms:
        learner.fit(X[:records], Y[:records], rng=generator())
    ((event, count),) = learner.privacy_events
    assert event.steps * count == len(norms) == 2 * math.ceil(records / batch)
    assert min(norms) > 10 / batch  # 650 numbers of deviation 1 / batch
    if records == 50:
        assert 20 < len(Watched.seen) < 85  # (1 - 1/50)^50 of the batches are empty


def test_each_fit_adds_an_event() -> None:
    """Fitting again spends again; answers, soft labels and copies are free."""
    learner = seeded(noise_multiplier=1.0)
    for records in (40, 40, 50):
        learner.fit(X[:records], Y[:records], rng=generator())
    learner.predict(X)
    scores = learner.logits(X[:60])
    learner.to_arrays()
    learner.distill(X[:60], scores, rng=generator())
    assert [(e.records, count) for e, count in learner.privacy_events] == [(40, 2), (50, 1)]


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("fit", {"y": Y[:40] + 9}, "y must be between 0 and 9"),
        ("partial_fit", {"y": Y[:40] + 9, "epochs": 1}, "y must be between 0 and 9"),
        ("partial_fit", {"x": X[:40, :9], "epochs": 1}, r"x must be rows of shape \(64,\)"),
        ("partial_fit", {"epochs": 0}, "epochs must be a whole number"),
        ("distill", {"targets": SHARES[:39]}, r"targets must be of shape \(40, 10\)"),
        ("distill", {"targets": SHARES[:40] + 1}, "targets must be probabilities between"),
        ("distill", {"x": X[:40, :9]}, r"x must be rows of shape \(64,\)"),
    ],
)
def test_what_is_refused_spends_nothing(way: str, change: dict[str, Any], message: str) -> None:
    """Model and events stay what they were."""
    learner = seeded(private_distill=True).fit(X[:40], Y[:40], rng=generator())
    before, events = flat(learner), learner.privacy_events
    taught: dict[str, Any] = {"x": X[:40], "y": Y[:40]}
    if way == "distill":
        taught = {"x": X[:40], "targets": SHARES[:40], "recipe": Recipe(link="softmax")}
    with pytest.raises(ValueError, match=message):
        getattr(learner, way)(**{**taught, **change}, rng=generator())
    assert np.array_equal(flat(learner), before)
    assert learner.privacy_events == events


def test_twins_have_their_own_events() -> None:
    """Twins of a fitted learner start with nothing spent and leave its count alone."""
    learner = seeded().fit(X[:40], Y[:40], rng=generator())
    sets = [(X[:30], Y[:30]), (X[30:50], Y[30:50])]
    twins = learner.fit_many(sets, rngs=[generator(1), generator(2)])
    assert [twin.privacy_events[0][0].records for twin in twins] == [30, 20]
    assert [len(twin.privacy_events) for twin in (learner, *twins)] == [1, 1, 1]
    assert learner.from_arrays(learner.to_arrays()).privacy_events == ()
    assert learner.privacy_events[0][0].records == 40
    alone = seeded().fit(*sets[1], rng=generator(2))
    assert np.array_equal(flat(alone), flat(twins[1]))
    with pytest.raises(InvalidParameter, match="rngs must be 2 generators, one a training"):
        learner.fit_many(sets, rngs=[generator()])


def test_nothing_else_touches_records() -> None:
    """Whatever `TorchLearner` can do is either private here or known to be free."""
    offered = {name for name, _ in inspect.getmembers(TorchLearner, inspect.isfunction)}
    public = {name for name in offered if not name.startswith("_")}
    private, own = {"fit", "partial_fit"}, {"fit_many", "distill", "initialised"}
    # `from_arrays` fills what `initialised` gives; layers are other names of the weights.
    weights = {"to_arrays", "from_arrays", "to_layers", "from_layers", "sized_for", "head"}
    assert public == private | own | weights | {"predict", "logits", "features"}
    assert own | {"_learn", "_loss"} <= vars(DPTorchLearner).keys()
    for verb, options in (("fit", {}), ("partial_fit", {"epochs": 1})):
        learner: Any = seeded()
        getattr(learner, verb)(X, Y, rng=generator(), **options)
        assert len(learner.privacy_events) == 1, verb


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(loss="l1", link="sigmoid", epochs=2)])
def test_distillation_is_plain_training_on_public_rows(recipe: Recipe) -> None:
    """From scratch it is what a TorchLearner does, to the bit."""
    targets = generator(1).uniform(size=(60, 10))
    shared: dict[str, Any] = {"epochs": 5, "weight_decay": 1e-4, "schedule": "cosine"}
    learner = seeded(distill_learning_rate=0.01, optimizer="sgd", **shared)
    plain = TorchLearner(linear, num_classes=10, learning_rate=0.01, **shared)
    learner.distill(X[:60], targets, rng=generator(2), recipe=recipe)
    plain.distill(X[:60], targets, rng=generator(2), recipe=recipe)
    assert np.array_equal(learner.logits(X), plain.logits(X))
    assert learner.privacy_events == ()


def test_distillation_goes_on_from_what_was_fitted() -> None:
    """A fitted model moves from where it is, and rows of another shape are refused."""
    learner = seeded(noise_multiplier=1.0).fit(X[:60], Y[:60], rng=generator())
    before = flat(learner)
    learner.distill(X[:60], learner.logits(X[:60]), rng=generator())
    assert 0 < np.abs(flat(learner) - before).max() + 1e-9 < 0.01
    with pytest.raises(InvalidData, match=r"rows of shape \(64,\)"):
        learner.distill(X[:, :9], np.zeros((len(X), 10)), rng=generator())


RECIPES = [
    Recipe(loss="mse"),
    Recipe(loss="l1", link="softmax"),
    Recipe(loss="l2", link="sigmoid", temperature=0.5),
    Recipe(loss="cross-entropy", link="softmax", temperature=3.0),
    Recipe(loss="cross-entropy", link="sigmoid"),
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.loss}-{r.link}")


@each_recipe
def test_private_distillation_minimises_what_the_recipe_says(recipe: Recipe) -> None:
    """Without clipping and noise a full batch is one step of plain descent."""
    shared: dict[str, Any] = {"batch_size": 40, "epochs": 1, "learning_rate": 0.5}
    private = {"private_distill": True, "max_grad_norm": 1e6, "noise_multiplier": 1e-12}
    learner = seeded(**shared, **private)
    plain = TorchLearner(linear, num_classes=10, optimizer="sgd", momentum=0.0, **shared)
    learner.distill(X[:40], SHARES[:40], rng=generator(3), recipe=recipe)
    plain.distill(X[:40], SHARES[:40], rng=generator(3), recipe=recipe)
    expected = np.concatenate([value.ravel() for value in plain.to_arrays().values()])
    assert np.allclose(flat(learner), expected, atol=1e-6)
    assert np.abs(flat(learner) - start(linear, 3)).max() > 1e-4


@each_recipe
def test_private_distillation_clips_every_record(recipe: Recipe) -> None:
    """However large its gradient, learning rate times norm is all a record gets."""
    learner = seeded(private_distill=True, max_grad_norm=1e-3, learning_rate=2.0)
    learner.distill(X[:1], np.eye(10)[:1], rng=generator(1), recipe=recipe)
    moved = np.linalg.norm(flat(learner) - start(linear, 1))
    assert moved == pytest.approx(2e-3, rel=1e-2)


@pytest.mark.parametrize("way", ["partial_fit", "distill"])
def test_going_on_is_charged_like_any_other_training(way: str) -> None:
    """It starts from what was fitted; the events hold the steps of both and compose."""
    learner = seeded(private_distill=True, noise_multiplier=4.0, secure=True)
    train(learner, "fit", X[:100], epochs=2)
    before = flat(learner)
    learner.learning_rate = 1e-6
    for epochs in (3, 3, 2):
        train(learner, way, X[:100], epochs=epochs)
    assert [(e.steps, n) for e, n in learner.privacy_events] == [(8, 1), (12, 2), (8, 1)]
    assert 0 < np.abs(flat(learner) - before).max() < 1e-4
    spent = claim(learner.privacy_events, 1e-5).epsilon
    assert spent == pytest.approx(dpsgd_epsilon(100, 32, 40, 4.0, 1e-5), rel=1e-3)


@each_way
def test_a_target_holds_for_every_call(way: str) -> None:
    """Longer training gets more noise, so that it spends the same."""
    learner = seeded(private_distill=True, target_epsilon=2.0, delta=1e-4, secure=True)
    for epochs in (1, 8):
        train(learner, way, X[:64], epochs=epochs)
    (short, _), (long, _) = learner.privacy_events
    assert long.noise_multiplier > 1.5 * short.noise_multiplier
    assert 1.9 < epsilon_of(short, 1e-4) <= 2.0
    assert 1.9 < epsilon_of(long, 1e-4) <= 2.0


def test_partial_fit_without_parameters_is_a_fit() -> None:
    """With some it moves them by noise that is new in every step."""
    fresh, fitted = (seeded(silent, noise_multiplier=1.0, learning_rate=1.0) for _ in "ab")
    rows = np.zeros((32, 500))
    train(fresh, "partial_fit", rows, epochs=4)
    before = flat(train(fitted, "fit", rows, epochs=4))
    assert np.array_equal(flat(fresh), before)
    moved = flat(train(fitted, "partial_fit", rows, seed=1, epochs=9)) - before
    assert moved.std() == pytest.approx(3 / 32, rel=0.05)
    assert abs(np.corrcoef(moved, before)[0, 1]) < 0.1


def test_an_interrupted_partial_fit_leaves_the_model_alone() -> None:
    """Steps that no event tells of must not be in the parameters."""
    learner = seeded(noise_multiplier=1.0).fit(X[:40], Y[:40], rng=generator())
    before = flat(learner)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = register_optimizer_step_post_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            learner.partial_fit(X[:40], Y[:40], rng=generator(), epochs=1)
    finally:
        handle.remove()
    assert np.array_equal(flat(learner), before)
    assert len(learner.privacy_events) == 1


@pytest.mark.parametrize("way", ["partial_fit", "distill"])
def test_received_models_go_on_privately(way: str) -> None:
    """A twin made of arrays starts with the sender's parameters, charged for its own steps."""
    sender = train(seeded(private_distill=True), way, X[:40])
    twin = seeded(private_distill=True, learning_rate=1e-30).from_arrays(sender.to_arrays())
    train(twin, way, X[:50], epochs=2)
    assert np.array_equal(flat(twin), flat(sender))
    assert [(e.records, e.steps) for e, _ in twin.privacy_events] == [(50, 4)]
    assert [event.records for event, _ in sender.privacy_events] == [40]


def test_numbers_are_learned_privately() -> None:
    """Regression with little noise comes close to a linear truth of one output."""
    truth = X[:600] @ generator(1).normal(size=(64, 1)).astype(np.float32)
    learner = seeded(
        lambda: nn.Linear(64, 1),
        num_classes=1,
        task="regression",
        epochs=30,
        learning_rate=0.2,
        noise_multiplier=0.5,
    )
    learner.fit(X[:600], truth, rng=generator())
    assert np.square(learner.predict(X[:600]) - truth).mean() < 0.2 * truth.var()


def test_momentum_and_schedule_see_noised_gradients_only() -> None:
    """Pure noise, taken with momentum along a cosine, has the deviation these give it."""
    learner = seeded(
        silent,
        noise_multiplier=1.0,
        learning_rate=1.0,
        momentum=0.5,
        schedule="cosine",
        final_learning_rate=0.0,
        epochs=2,
    )
    learner.fit(np.zeros((32, 500)), Y[:32], rng=generator())
    # Rates 1 and 1/2: the first noise moves the weights by 1 + 1/2 * 1/2, the second by 1/2.
    assert flat(learner).std() * 32 == pytest.approx(math.hypot(1.25, 0.5), rel=0.05)


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "noise", "delta", "epsilon"),
    [
        (2880, 64, 20, 1.0, 1e-5, 4.151097),
        (2880, 64, 40, 1.0, 1e-5, 5.979993),
        (300, 32, 40, 2.0, 1e-4, 4.572031),
    ],
)
def test_two_accountants_agree(
    records: int, batch: int, epochs: int, noise: float, delta: float, epsilon: float
) -> None:
    """A planned fit costs the reference value, and what Opacus itself would report."""
    learner = seeded(batch_size=batch, epochs=epochs, noise_multiplier=noise)
    event = learner._plan(records)
    ours = epsilon_of(event, delta)
    theirs = PRVAccountant()
    theirs.history = [(noise, event.batch_size / event.records, event.steps)]
    assert ours == pytest.approx(epsilon, abs=1e-4)
    assert ours == pytest.approx(theirs.get_epsilon(delta, eps_error=0.002), abs=1e-2)


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "target"),
    [(300, 32, 10, 2.0), (100, 100, 20, 1.0), (1000, 20, 1, 0.2), (60, 32, 5, 0.01)],
)
def test_target_is_reached_and_not_passed(
    records: int, batch: int, epochs: int, target: float
) -> None:
    """The noise spends nearly all of the target and never more."""
    learner = seeded(batch_size=batch, epochs=epochs, target_epsilon=target)
    assert 0.95 * target < epsilon_of(learner._plan(records), 1e-5) <= target


def test_a_fit_uses_the_calibrated_noise() -> None:
    """What is drawn has the deviation that the target asks for."""
    learner = seeded(silent, target_epsilon=2.0, delta=1e-4, learning_rate=1.0)
    learner.fit(np.zeros((32, 500)), Y[:32], rng=generator())
    noise = learner.privacy_events[0][0].noise_multiplier
    assert flat(learner).std() == pytest.approx(noise / 32, rel=0.05)


def test_there_is_always_some_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sampling alone meets the target, the least noise is used, not none."""
    assert dp_sgd.LEAST_NOISE == 0.3
    monkeypatch.setattr(dp_sgd, "LEAST_NOISE", 2.0)  # accounted for sooner
    assert calibrated_noise(10**5, 1, 1, target_epsilon=1.0, delta=1e-4) == 2.0


def test_a_target_out_of_reach_is_refused() -> None:
    """A target that would need endless noise is named instead of searched for."""
    with pytest.raises(InvalidParameter, match="target_epsilon must be in reach of a noise"):
        calibrated_noise(50, 50, 10_000, target_epsilon=1e-9, delta=1e-12)


class Mixing(nn.Module):
    """Subtracts from every row what the batch has in common; its last layer starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)
        nn.init.zeros_(self.last.weight)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        scores: Tensor = self.last(hidden - hidden.mean(dim=0))
        return scores


class Pieces(nn.Module):
    """Cuts every row into eight that Opacus takes for records, each with its own clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack(list(self.linear(rows.reshape(-1, 8)).chunk(len(rows)))).sum(dim=1)


class Idle(nn.Module):
    """Has a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.used(rows)
        return scores


class Recurrent(nn.Module):
    """Reads a row as eight steps of eight numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(6, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.last(self.layer(rows.reshape(len(rows), 8, 8))[0][:, -1])
        return scores


class Tokens(nn.Module):
    """Looks its numbers up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(17, 5), nn.Linear(5, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.last(self.table((rows * 16).long().clamp(0, 16)).mean(dim=1))
        return scores


class OwnWeights(nn.Module):
    """Has parameters of its own instead of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 10) / 8)

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


class FrozenBackbone(nn.Module):
    """Normalises with fixed statistics, which do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(64).requires_grad_(False), nn.Linear(64, 10)

    def train(self, mode: bool = True) -> "FrozenBackbone":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.last(self.norm(rows))
        return scores


class Renamed(nn.BatchNorm1d):
    """A batch normalisation that Opacus does not know by its type."""


def around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), layer, nn.Linear(8, 10))


def tied() -> nn.Module:
    layer = nn.Linear(64, 64)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(64, 10))


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    module[0].requires_grad_(False)
    return module


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )


def running_statistics() -> nn.Module:
    norm = nn.InstanceNorm1d(8, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (8, 8)), norm, nn.Flatten(), nn.Linear(64, 10))


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: around(nn.BatchNorm1d(8)), "BatchNorm1d at '1'. Use GroupNorm"),
    (lambda: around(nn.BatchNorm1d(8, affine=False)), "BatchNorm1d at '1'. Use GroupNorm"),
    (lambda: around(Renamed(8, track_running_stats=False)), "Renamed at '1'. Use GroupNorm"),
    (lambda: Recurrent(nn.LSTM(8, 6)), "LSTM at 'layer'. Opacus says: .* DPLSTM"),
    (lambda: Recurrent(nn.RNN(8, 6, batch_first=True)), "an error. Opacus says: "),
    (running_statistics, "record nothing in buffers, got a change of '1.running_mean'"),
    (Mixing, "treat every row by itself, got rows that influence each other"),
    (Pieces, "in every layer, got 16 gradients of 'linear.weight' for 2 rows"),
    (Idle, "all learn, got no gradient of 'idle.weight'. Freeze it"),
]

ACCEPTED: list[Callable[[], nn.Module]] = [
    convolution,
    lambda: around(nn.LayerNorm(8)),
    lambda: around(nn.Dropout(0.2)),
    lambda: around(nn.PReLU()),
    lambda: Recurrent(DPLSTM(8, 6, batch_first=True)),
    Tokens,
    OwnWeights,
    FrozenBackbone,
    tied,
    half_frozen,
]


@pytest.mark.parametrize(("module_fn", "reason"), REFUSED)
def test_what_cannot_be_private_is_named(
    module_fn: Callable[[], nn.Module], reason: str
) -> None:
    """A module that would break the guarantee is refused before any training."""
    with steps_taken() as norms, pytest.raises(InvalidParameter, match=reason) as caught:
        seeded(module_fn).fit(X[:40], Y[:40], rng=generator())
    assert str(caught.value).startswith("DPTorchLearner: module_fn must be a factory of")
    assert norms == []


@pytest.mark.parametrize("module_fn", ACCEPTED)
def test_what_can_be_private_learns(module_fn: Callable[[], nn.Module]) -> None:
    """Modules of many kinds are trained, without a warning, and can travel."""
    learner = seeded(module_fn, epochs=4, batch_size=8, learning_rate=0.3)
    learner.fit(X[:100], Y[:100], rng=generator())
    unmoved = seeded(module_fn, learning_rate=1e-30).fit(X[:1], Y[:1], rng=generator())
    assert mean_loss(learner) < mean_loss(unmoved) - 0.01
    twin = seeded(module_fn).from_arrays(learner.to_arrays())
    assert np.array_equal(twin.logits(X[:50]), learner.logits(X[:50]))


def test_frozen_parameters_stay() -> None:
    """Noise is added only to what is trained."""
    learner = seeded(half_frozen, noise_multiplier=5.0).fit(X[:40], Y[:40], rng=generator(4))
    moved = flat(learner) != start(half_frozen, 4)
    assert not moved[: 64 * 8 + 8].any()
    assert moved[64 * 8 + 8 :].all()


def test_no_gradient_of_a_record_stays_behind() -> None:
    """A fitted module holds parameters only, not what Opacus wrote beside them."""
    learner = seeded(perceptron).fit(X[:40], Y[:40], rng=generator())
    module = learner._fitted()
    for parameter in module.parameters():
        assert vars(parameter) == {}
        assert parameter.grad is None
    for layer in module.modules():
        assert not layer._forward_hooks
        assert not layer._backward_hooks
        assert not hasattr(layer, "activations")
    assert len(pickle.dumps(module)) < 4 * len(flat(learner)) + 5000


def test_teachers_are_private_and_students_free() -> None:
    """A record is in one teacher of each partition: s events of its party compose."""
    splits, teachers = 2, 3
    party = Party(
        x=X[:121],
        y=Y[:121],
        public=X[1000:1040],
        num_classes=10,
        learner_fn=lambda: TorchLearner(linear, num_classes=10),
        teacher_fn=lambda: seeded(noise_multiplier=4.0, batch_size=16),
    )
    counts = teacher_votes(party, train_teachers(party, splits, teachers, seed=0), splits)
    assert counts.sum(axis=2).tolist() == [[teachers] * 40] * splits
    sets = list(zip(np.array_split(party.x, 3), np.array_split(party.y, 3), strict=True))
    events: list[tuple[DPSGDEvent, int]] = []
    for teacher in fit_ensemble(
        party.teacher_fn or party.learner_fn, sets, rngs=[generator()] * 3
    ):
        events.extend(getattr(teacher, "privacy_events", ()))
    costs = [
        dpsgd_epsilon(e.records, e.batch_size, splits * e.steps, e.noise_multiplier, 1e-5)
        for e, _ in events
    ]
    assert [event.records for event, _ in events] == [41, 40, 40]
    assert max(costs) == costs[1] == costs[2] > costs[0]  # small subsets cost most
    assert not hasattr(party.learner_fn(), "privacy_events")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_multiplier": None}, "exactly one of noise_multiplier and target_epsilon must"),
        ({"target_epsilon": 1.0}, "must be given, got 1.0 and 1.0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be finite and above 0, got 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be finite and above 0"),
        ({"noise_multiplier": None, "target_epsilon": -1.0}, "target_epsilon must be finite"),
        ({"noise_multiplier": None, "target_epsilon": math.inf}, "finite and above 0, got inf"),
        ({"max_grad_norm": 0}, "max_grad_norm must be finite"),
        ({"delta": 0.0}, "delta must be between 0 and 1, got 0.0"),
        ({"delta": 1.0}, "delta must be between 0 and 1, got 1.0"),
        ({"secure": 1}, "secure must be True or False, got 1"),
        ({"private_distill": 1}, "private_distill must be True or"),
        ({"distill_learning_rate": 0}, "distill_learning_rate must"),
        ({"augment": abs}, "augment must be omitted in private"),
        ({"channels_last": True}, "channels_last must be omitted"),
        ({"epochs": 0}, "epochs must be a whole number"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    """A setting that breaks its rule is refused when the learner is made."""
    with pytest.raises(InvalidParameter, match=message):
        DPTorchLearner(linear, num_classes=10, **{"noise_multiplier": 1.0, **settings})
