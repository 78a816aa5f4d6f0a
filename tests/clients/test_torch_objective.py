"""What strategies beyond averaging need of a network: objectives, steps, devices, layouts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clients.networks.learner import TorchLearner
from clients.networks.private import DPTorchLearner
from clients.tabular.sklearn import SklearnLearner
from fl_strategies import GuidedLearner, Objective
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, UnsupportedLearner
from fl_strategies.learners import (
    Correction,
    Generated,
    Prototypes,
    Proximal,
    Term,
    require_features,
    require_guided,
)
from tests.clients.digits import generator

RATE, EPOCHS = 0.05, 3
RNG = np.random.default_rng(0)
X: Array = RNG.normal(size=(40, 6)).astype(np.float32)
Y: IntArray = RNG.integers(3, size=40)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def learner(module_fn: Any = perceptron, **settings: Any) -> TorchLearner:
    plain: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": RATE}
    settings = {"batch_size": 40, **plain, **settings}
    return TorchLearner(module_fn, num_classes=3, epochs=EPOCHS, **settings)


def private(**settings: Any) -> DPTorchLearner:
    """Return a learner whose noise and clipping hardly change anything."""
    strength: dict[str, Any] = {
        "noise_multiplier": 1e-6,
        "max_grad_norm": 50.0,
        "secure": False,
    }
    return DPTorchLearner(
        perceptron,
        num_classes=3,
        batch_size=40,
        learning_rate=RATE,
        **{**strength, **settings},
    )


def going_on(
    model: Any, *terms: Any, epochs: int = 1, seed: int = 0, step_size: float | None = None
) -> Any:
    """Let a model learn the rows with an objective of these terms."""
    objective = Objective(terms=terms, step_size=step_size)
    return model.partial_fit(X, Y, rng=generator(seed), epochs=epochs, objective=objective)


def like(arrays: dict[str, Array], scale: float) -> dict[str, Array]:
    rng = generator(9)
    return {n: (scale * rng.normal(size=a.shape)).astype(a.dtype) for n, a in arrays.items()}


def by_formula(term: Term, first: dict[str, Array], weights: dict[str, nn.Parameter]) -> Tensor:
    """Return the value of one term, from the weights of `perceptron` alone."""
    if isinstance(term, Proximal):
        anchor = term.anchor or first
        away = [(weight - torch.tensor(anchor[n])).square() for n, weight in weights.items()]
        return term.mu / 2 * torch.cat([each.flatten() for each in away]).sum()
    if isinstance(term, Correction):
        given = torch.cat([torch.tensor(term.arrays[n]).flatten() for n in weights])
        return given @ torch.cat([weight.flatten() for weight in weights.values()])
    if isinstance(term, Generated):
        features = torch.tensor(term.features, dtype=torch.float32)
        chances = (features @ weights["2.weight"].T + weights["2.bias"]).softmax(dim=1)
        rows = range(len(term.labels))
        return -term.strength * chances[rows, term.labels].log().mean()
    total = torch.zeros(())
    for x, y in zip(torch.tensor(X), Y, strict=True):
        if term.known is None or term.known[y]:
            features = (weights["0.weight"] @ x + weights["0.bias"]).clamp(min=0)
            away = features - torch.tensor(term.prototypes[y], dtype=torch.float32)
            total = total + (away @ away) / len(away)
    return term.strength * total / len(X)


def textbook(start: TorchLearner, objective: Objective) -> dict[str, Array]:
    """Return full gradient descent on the loss and the objective, written as formulas."""
    module = perceptron()
    state = {name: torch.tensor(value) for name, value in start.to_arrays().items()}
    module.load_state_dict(state)
    named = dict(module.named_parameters())
    for _ in range(EPOCHS):
        loss = nn.functional.cross_entropy(module(torch.tensor(X)), torch.tensor(Y))
        for term in objective.terms:
            loss = loss + by_formula(term, start.to_arrays(), named)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(module.parameters(), gradients, strict=True):
                weight -= RATE * gradient
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def some_terms(arrays: dict[str, Array]) -> dict[str, tuple[Term, ...]]:
    rng = generator(7)
    given = {"features": rng.normal(size=(9, 5)), "labels": rng.integers(3, size=9)}
    prototypes = rng.normal(size=(3, 5))
    known = np.array([True, False, True])
    each: dict[str, Term] = {
        "mu": Proximal(mu=2.0),
        "anchor": Proximal(mu=2.0, anchor=like(arrays, 1.0)),
        "correction": Correction(like(arrays, 0.5)),
        "generated": Generated(**given, strength=2.0),
        "prototypes": Prototypes(prototypes=prototypes, strength=3.0),
        "some-prototypes": Prototypes(prototypes=prototypes, known=known, strength=3.0),
    }
    return {**{name: (term,) for name, term in each.items()}, "all": tuple(each.values())}


@pytest.mark.parametrize("kind", some_terms({}))
@pytest.mark.parametrize("make", [learner, private])
def test_an_objective_is_minimised_beside_the_loss(make: Any, kind: str) -> None:
    """Every term is what its formula says, alone and together with the others."""
    start = learner().fit(X, Y, rng=generator())
    arrays = start.to_arrays()
    objective = Objective(terms=some_terms(arrays)[kind])

    model = make().from_arrays(arrays)
    going_on(model, *objective.terms, epochs=EPOCHS, seed=1)

    expected = textbook(start, objective)
    plain = textbook(start, Objective())
    for name, value in expected.items():
        np.testing.assert_allclose(model.to_arrays()[name], value, atol=2e-5)
    assert max(np.abs(expected[name] - plain[name]).max() for name in plain) > 1e-3


@pytest.mark.parametrize("batch_size", [40, 7])
def test_prototypes_are_a_mean_over_the_rows_of_a_batch(batch_size: int) -> None:
    """A strong pull brings the features there, in batches of any size."""
    prototypes = np.abs(generator(7).normal(size=(3, 5)))
    model = learner(batch_size=batch_size, optimizer="adam").fit(X, Y, rng=generator())

    def away() -> float:
        return float(np.square(model.features(X) - prototypes[Y]).mean())

    before = away()
    going_on(model, Prototypes(prototypes=prototypes, strength=1000.0), epochs=40, seed=1)

    assert away() < before / 2


def test_features_are_what_the_last_layer_takes() -> None:
    """Logits are its product with them; a module is as it was, and takes no rows too."""
    for make in (learner, private):
        model = make().fit(X, Y, rng=generator())
        weight, bias = model.head()
        logits = model.logits(X)
        features = require_features("FedProto", model).features(X)

        assert features.shape == (40, 5)
        assert features.dtype == np.float32
        np.testing.assert_allclose(features @ weight.T + bias, logits, rtol=1e-5, atol=1e-6)
        assert model.features(X[:0]).shape == (0, 5)
        np.testing.assert_array_equal(model.logits(X), logits)
        assert not any(part._forward_pre_hooks for part in model._fitted().modules())


def convolutions() -> nn.Module:
    """Return what kernels of their own train and evaluate, where no term sees features."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


def test_kernels_step_aside_for_features() -> None:
    """Compiled convolutions never call the last layer, which would leave features unseen."""
    images = generator(3).normal(size=(20, 1, 8, 8)).astype(np.float32)
    labels = Y[:20]
    pull = Prototypes(prototypes=np.zeros((3, 8)), strength=5.0)
    model = learner(convolutions, batch_size=20).fit(images, labels, rng=generator())
    weight, bias = model.head()

    features = model.features(images)
    np.testing.assert_allclose(
        features @ weight.T + bias, model.logits(images), rtol=1e-3, atol=1e-5
    )
    objective = Objective(terms=(pull,))
    model.partial_fit(images, labels, rng=generator(), epochs=20, objective=objective)
    assert np.square(model.features(images)).mean() < np.square(features).mean() / 2


@pytest.mark.parametrize("make", [learner, private])
def test_prototypes_must_fit(make: Any) -> None:
    """Their classes and features are the module's, and a task without classes has none."""
    with pytest.raises(KnowledgeMismatch, match=r"prototypes must be of shape \(3, 5\)"):
        going_on(make(), Prototypes(prototypes=np.zeros((3, 6))))
    with pytest.raises(InvalidParameter, match=r"known must be of shape \(3,\), got \(2,\)"):
        Prototypes(prototypes=np.zeros((3, 5)), known=np.ones(2, bool))
    with pytest.raises(InvalidParameter, match=r"Prototypes: strength must be finite"):
        Prototypes(prototypes=np.zeros((3, 5)), strength=np.inf)
    right = Objective(terms=(Prototypes(prototypes=np.zeros((3, 5))),))
    numbers = learner(task="regression")
    with pytest.raises(UnsupportedLearner, match="task must be single-label for prototypes"):
        numbers.partial_fit(X, np.zeros((40, 3)), rng=generator(), epochs=1, objective=right)
    tokens = learner(lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), Pooled()))
    with pytest.raises(UnsupportedLearner, match=r"one row of features per record"):
        tokens.fit(X, Y, rng=generator()).features(X)


class Pooled(nn.Module):
    """A module whose last layer sees several rows per record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.linear(rows).mean(dim=1)
        return scores


def test_unknown_terms_are_refused() -> None:
    """A term that a learner would ignore changes what is learned without a word.

    A negative pull would push the weights away without end.
    """
    other: Any = SimpleNamespace(strength=1.0)
    sentence = "terms of an objective must be Proximal.* got SimpleNamespace"
    with pytest.raises(UnsupportedLearner, match=sentence):
        going_on(learner(), other)
    with pytest.raises(InvalidParameter, match=r"Proximal: mu must be finite and at least 0"):
        Proximal(mu=-1.0)


def test_a_record_pulled_to_its_prototype_is_clipped() -> None:
    """However far a prototype is, a record moves private weights by no more than the norm."""
    model = private(max_grad_norm=0.01).fit(X, Y, rng=generator())
    before = model.to_arrays()
    going_on(model, Prototypes(prototypes=np.full((3, 5), 1e6)))

    after = model.to_arrays()
    moved = sum(float(np.square(after[name] - before[name]).sum()) for name in before) ** 0.5
    assert 0 < moved <= RATE * 0.01 * 1.001


class Mixing(nn.Module):
    """A module that mixes rows in what its last layer takes, and hides it from the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.last = nn.Linear(3, 5)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.first(rows)
        return logits + 0.0 * self.last(logits - logits.mean(dim=0))[:, :3]


def test_features_that_mix_rows_are_refused_in_private_training() -> None:
    """Clipping one record would not bound what it does to the features of the others."""
    model = DPTorchLearner(Mixing, num_classes=3, noise_multiplier=1.0, secure=False)
    model.fit(X, Y, rng=generator())
    spent = model.privacy_events
    with pytest.raises(InvalidParameter, match="treat every row by itself"):
        going_on(model, Prototypes(prototypes=np.zeros((5, 3))))
    assert model.privacy_events == spent


@pytest.mark.parametrize("make", [learner, private])
def test_a_step_size_takes_the_place_of_the_optimizer(make: Any) -> None:
    """Plain descent of this size, whatever the learner would do; its settings stay."""
    start = learner().fit(X, Y, rng=generator())
    term = Correction(like(start.to_arrays(), 0.5))
    other: dict[str, Any] = {"optimizer": "adam", "schedule": "cosine"}

    model = make(**other).from_arrays(start.to_arrays())
    model.learning_rate = 3.0
    going_on(model, term, epochs=EPOCHS, seed=1, step_size=RATE)

    for name, value in textbook(start, Objective(terms=(term,))).items():
        np.testing.assert_allclose(model.to_arrays()[name], value, atol=2e-5)
    assert (model.optimizer, model.learning_rate) == ("adam", 3.0)
    with pytest.raises(InvalidParameter, match="step_size must be finite and above 0, got 0"):
        Objective(step_size=0.0)


def test_no_objective_changes_no_bit() -> None:
    """Neither does one that asks for nothing."""
    idle = Proximal(mu=0.0), Prototypes(prototypes=np.zeros((3, 5)), strength=0.0)
    start, scores = learner(optimizer="adam").fit(X, Y, rng=generator()).to_arrays(), []
    for terms in (None, (), idle, (Proximal(mu=1.0),)):
        model = learner(optimizer="adam").from_arrays(start)
        if terms is None:
            model.partial_fit(X, Y, rng=generator(1), epochs=2)
        else:
            going_on(model, *terms, epochs=2, seed=1)
        scores.append(model.logits(X))
    plain, empty, nothing, pulled = scores

    np.testing.assert_array_equal(plain, empty)
    np.testing.assert_array_equal(plain, nothing)
    assert not np.array_equal(plain, pulled)


def test_buffers_among_the_arrays_have_no_effect() -> None:
    """`to_arrays` of a model can be an anchor as it is; frozen weights stay."""
    model = learner(normalised).fit(X, Y, rng=generator())
    arrays = model.to_arrays()
    assert "1.running_mean" in arrays

    assert going_on(model, Proximal(mu=1, anchor=arrays)).steps_taken == 1


@pytest.mark.parametrize("make", [learner, private])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"0.weight": None}, "'0.weight' must be given, got none"),
        ({"7.weight": np.zeros(3)}, "'7.weight' must be omitted, got one"),
        ({"0.bias": np.zeros(9, np.float32)}, r"'0.bias' must be float32 of shape \(5,\)"),
        ({"0.bias": np.full(5, np.nan, np.float32)}, "with NaN or infinity"),
    ],
)
def test_arrays_of_other_weights_are_refused(
    make: Any, change: dict[str, Any], sentence: str
) -> None:
    """They come from a server; nothing is learned, and nothing spent, before they fit."""
    model = make().fit(X, Y, rng=generator())
    before, spent = model.to_arrays(), getattr(model, "privacy_events", ())
    wrong = {n: a for n, a in {**before, **change}.items() if a is not None}

    term: Term
    for kind, term in (
        ("anchor", Proximal(mu=1.0, anchor=wrong)),
        ("correction", Correction(wrong)),
    ):
        with pytest.raises(KnowledgeMismatch, match=f"{kind} '.*{sentence.partition(' ')[2]}"):
            going_on(model, term)
    assert getattr(model, "privacy_events", ()) == spent
    assert all(np.array_equal(before[n], a) for n, a in model.to_arrays().items())


def test_learners_without_weights_say_that_they_take_no_objective() -> None:
    """A strategy asks before any record is touched."""
    from sklearn.tree import DecisionTreeClassifier

    tree = SklearnLearner(DecisionTreeClassifier(), num_classes=3)
    sentence = "FedProx: the learner must take an objective .*, got SklearnLearner"
    with pytest.raises(UnsupportedLearner, match=sentence):
        require_guided("FedProx", tree)
    for taker in (learner(), private()):
        assert isinstance(taker, GuidedLearner)
        assert require_guided("FedProx", taker) is taker


def linear(**settings: Any) -> TorchLearner:
    """Return least squares of one number by gradient descent."""
    plain: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1}
    module_fn = lambda: nn.Linear(2, 1, bias=False)  # noqa: E731
    return TorchLearner(module_fn, num_classes=1, task="regression", **plain, **settings)


@pytest.mark.parametrize("scaffold", [True, False])
def test_scaffold_corrects_the_drift_of_parties_that_differ(scaffold: bool) -> None:
    """By control variates from outside; without them the average stays beside the optimum."""
    rng = generator()
    x = rng.normal(size=(2, 32, 2)) * np.array([[[1.5, 0.3]], [[0.3, 1.5]]])
    y = np.stack([x[0] @ [[1.0], [0.0]], x[1] @ [[0.0], [1.0]]])
    optimum = np.linalg.lstsq(x.reshape(64, 2), y.reshape(64, 1))[0].T
    weights, controls = np.zeros((1, 2), np.float32), np.zeros((2, 1, 2), np.float32)

    for _ in range(40):
        models = []
        for i in (0, 1):
            own = controls.mean(axis=0) - controls[i]
            objective = Objective(terms=(Correction({"weight": own}),)) if scaffold else None
            model = linear(batch_size=32).from_arrays({"weight": weights})
            model.partial_fit(x[i], y[i], rng=rng, epochs=20, objective=objective)
            models.append(model)
        learned = np.stack([model.to_arrays()["weight"] for model in models])
        way = np.float32(0.1 * models[0].steps_taken)
        controls = controls - controls.mean(axis=0) + (weights - learned) / way
        weights = learned.mean(axis=0)

    distance = np.abs(weights - optimum).max()
    assert distance < 1e-3 if scaffold else distance > 0.1


@pytest.mark.parametrize(("batch_size", "steps"), [(40, 2), (13, 6), (39, 2), (7, 12)])
def test_steps_are_counted(batch_size: int, steps: int) -> None:
    """Of the last call, whichever verb it was; a single last row joins another batch."""
    model = learner(batch_size=batch_size)
    assert model.steps_taken == 0
    model.partial_fit(X, Y, rng=generator(), epochs=2)
    assert model.steps_taken == steps
    assert model.from_arrays(model.to_arrays()).steps_taken == 0
    assert model.distill(X, np.eye(3)[Y], rng=generator()).steps_taken == steps // 2 * EPOCHS
    twins = model.fit_many([(X, Y), (X, Y)], rngs=[generator(0), generator(1)])
    assert [twin.steps_taken for twin in twins] == [steps // 2 * EPOCHS] * 2


def test_private_steps_are_those_that_are_accounted() -> None:
    """And a distillation of public rows counts its own."""
    model = private(epochs=4).fit(X, Y, rng=generator())
    assert model.steps_taken == model.privacy_events[0][0].steps == 4
    assert model.distill(X, np.eye(3)[Y], rng=generator()).steps_taken == 4


@pytest.mark.parametrize("make", [learner, private])
def test_the_processor_is_the_default_and_auto_picks_what_is_there(make: Any) -> None:
    """Where there is no other device, both give the same bits."""
    default, named, auto = (
        make(**options).fit(X, Y, rng=generator())
        for options in ({}, {"device": "cpu"}, {"device": "auto"})
    )

    np.testing.assert_array_equal(default.logits(X), named.logits(X))
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        np.testing.assert_array_equal(default.logits(X), auto.logits(X))


@pytest.mark.parametrize("name", ["cuda", "mps"])
@pytest.mark.parametrize("make", [learner, private])
def test_a_device_that_is_missing_is_a_sentence(
    make: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what there is instead, or the names that are known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    sentence = rf"device must be available on this machine \(cpu\), got '{name}'"
    with pytest.raises(InvalidParameter, match=sentence):
        make(device=name)
    with pytest.raises(InvalidParameter, match="device must be one of auto, cpu, cuda, mps"):
        make(device="tpu")


class Viewing(nn.Module):
    """A module that flattens by `view`, which takes contiguous rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, rows: Tensor) -> Tensor:
        flat: Tensor = self.linear(rows.view(len(rows), -1))
        return flat


LAYOUTS = {
    "columns": np.asfortranarray,
    "mirrored": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", ["fit", "partial_fit", "distill", "fit_many"])
def test_rows_need_not_be_contiguous(verb: str, layout: str) -> None:
    """A layout in memory is no part of the data: the same model to the bit."""
    images: Array = X.reshape(20, 3, 2, 2)
    models = []
    for x, y in ((images, Y[:20]), (LAYOUTS[layout](images), Y[:20].repeat(2)[::2])):
        model: Any = learner(Viewing)
        if verb == "fit_many":
            models.append(
                model.fit_many([(x, y), (x, y)], rngs=[generator(0), generator(1)])[1]
            )
            continue
        targets: Array = np.eye(3)[y] if verb == "distill" else y
        options = {"epochs": 2} if verb == "partial_fit" else {}
        models.append(getattr(model, verb)(x, targets, rng=generator(), **options))

    plain, other = models
    np.testing.assert_array_equal(plain.logits(images), other.logits(LAYOUTS[layout](images)))


def test_private_rows_need_not_be_contiguous() -> None:
    """DP-SGD takes them too."""
    x = np.asfortranarray(X)[::-1]
    one, other = (private().fit(rows, Y, rng=generator()) for rows in (x, x.copy(order="C")))

    np.testing.assert_array_equal(one.logits(x), other.logits(x.copy(order="C")))


class Wrapped(nn.Module):
    """A module that answers as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, rows: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.inner(rows))


@pytest.mark.parametrize("make", [learner, DPTorchLearner])
def test_outputs_may_hold_their_logits(make: Any) -> None:
    """They train and answer as the module inside does, up to rounding, also in stacks."""
    settings = {"num_classes": 3, "noise_multiplier": 1.0, "secure": False}
    plain, wrapped = (
        make(module_fn, **(settings if make is DPTorchLearner else {}))
        for module_fn in (perceptron, Wrapped)
    )
    sets = [(X, Y), (X[::2], Y[::2])]
    for one, other in zip(
        plain.fit_many(sets, rngs=[generator(0), generator(1)]),
        wrapped.fit_many(sets, rngs=[generator(0), generator(1)]),
        strict=True,
    ):
        np.testing.assert_allclose(one.logits(X), other.logits(X), rtol=1e-4, atol=1e-5)
