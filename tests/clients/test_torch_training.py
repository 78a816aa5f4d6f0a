"""TorchLearner beyond labels: recipes, tasks, continuing, schedules and changes of rows."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_expit, log_softmax, softmax
from torch import Tensor, nn

from clients.networks.learner import TorchLearner
from clients.networks.training import RECORD_LOSSES, TASK_LOSSES, RecipeLoss
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import InvalidData
from fl_strategies.learners import Recipe, mean_auc
from tests.clients.digits import X, Y, generator
from tests.clients.networks import (
    assert_twins_match,
    flat,
    learner,
    perceptron,
    textbook,
)

BITS: IntArray = (Y[:, np.newaxis] >> np.arange(4)) & 1  # four labels of every digit
RECIPES = [
    Recipe(),
    Recipe(loss="l1"),
    Recipe(loss="l2"),
    Recipe(loss="l1", link="softmax", temperature=3.0),
    Recipe(loss="l2", link="sigmoid"),
    Recipe(loss="mse", link="sigmoid", temperature=0.5),
    Recipe(loss="cross-entropy", link="softmax"),
    Recipe(loss="cross-entropy", link="softmax", temperature=4.0),
    Recipe(loss="cross-entropy", link="sigmoid", temperature=2.0),
]
Verb = Callable[[TorchLearner], TorchLearner]


def of_labels(**settings: Any) -> TorchLearner:
    return learner(lambda: perceptron(4), num_classes=4, **settings)


def expected_loss(recipe: Recipe, logits: Array, targets: Array) -> float:
    """Return the loss of a recipe, as its definition says, in numpy."""
    scores = logits / recipe.temperature
    if recipe.loss == "cross-entropy" and recipe.link == "softmax":
        return float(-(targets * log_softmax(scores, axis=1)).sum(axis=1).mean())
    if recipe.loss == "cross-entropy":
        return float(-(targets * log_expit(scores) + (1 - targets) * log_expit(-scores)).mean())
    outputs = {
        "identity": scores,
        "softmax": softmax(scores, axis=1),
        "sigmoid": expit(scores),
    }[recipe.link]
    difference = outputs - targets
    if recipe.loss == "l2":
        return float(np.linalg.norm(difference, axis=1).mean())
    return float((np.abs(difference) if recipe.loss == "l1" else difference**2).mean())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_losses_are_what_recipes_say(recipe: Recipe) -> None:
    """Every loss equals its definition, with each row at the same weight."""
    logits = generator(1).normal(scale=3, size=(7, 5))
    targets = softmax(generator(2).normal(size=(7, 5)), axis=1)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    loss = RecipeLoss(recipe)(torch.from_numpy(logits), torch.from_numpy(targets), weights)
    assert float(loss) == pytest.approx(expected_loss(recipe, logits, targets), rel=1e-9)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_distilling_brings_every_loss_down(recipe: Recipe) -> None:
    """A student comes close to reachable targets of any kind."""
    teacher = learner(epochs=10).fit(X[:150], Y[:150], rng=generator())
    scores = teacher.logits(X[:150]) / recipe.temperature
    links: dict[str, Callable[[Array], Array]] = {
        "identity": lambda z: z,
        "softmax": lambda z: softmax(z, axis=1),
        "sigmoid": expit,
    }
    targets = links[recipe.link](scores)
    student = learner(epochs=1, learning_rate=3e-3)
    losses = []
    for epochs in (1, 60):
        longer = Recipe(
            loss=recipe.loss, link=recipe.link, temperature=recipe.temperature, epochs=epochs
        )
        student.distill(X[:150], targets, rng=generator(1), recipe=longer)
        losses.append(expected_loss(recipe, student.logits(X[:150]), targets))
    least = expected_loss(recipe, teacher.logits(X[:150]), targets)
    assert losses[1] - least < 0.5 * (losses[0] - least)


def test_a_distance_of_zero_has_a_gradient() -> None:
    """A student that is already there stays there, instead of becoming NaN."""
    model = learner(epochs=1).fit(X[:64], Y[:64], rng=generator())
    before = flat(model)
    # One row a step gives the very bits of its scores again.
    targets = np.concatenate([model.logits(X[i : i + 1]) for i in range(20)])
    model.batch_size = 1
    model.distill(X[:20], targets, rng=generator(), recipe=Recipe(loss="l2"))
    assert np.abs(flat(model) - before).max() < 0.01
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = RecipeLoss(Recipe(loss="l2"))(logits, torch.zeros(2, 3), torch.ones(2))
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_epochs_of_a_recipe_come_first() -> None:
    """A recipe's passes replace the learner's own, to the bit."""
    targets = generator(1).normal(size=(50, 10))
    told = learner(epochs=9).distill(X[:50], targets, rng=generator(), recipe=Recipe(epochs=2))
    own = learner(epochs=2).distill(X[:50], targets, rng=generator())
    np.testing.assert_array_equal(told.logits(X), own.logits(X))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_targets_of_a_link_are_probabilities(link: Any, wrong: float) -> None:
    """Scores where probabilities belong are named; for the identity they are right."""
    targets = np.full((4, 10), 0.1)
    targets[2, 3] = wrong
    rule = rf"probabilities between 0 and 1 for a {link} link, got .*{wrong:g}"
    with pytest.raises(InvalidData, match=f"^TorchLearner: targets must be {rule}"):
        learner().distill(X[:4], targets, rng=generator(), recipe=Recipe(link=link))
    learner().distill(X[:4], targets, rng=generator())


def test_rounded_probabilities_are_probabilities() -> None:
    """An average that leaves [0, 1] by a rounding error means its end."""
    models = []
    for past in (0.0, 1e-7):
        targets = np.tile([1.0 + past, 0.0 - past], (8, 5))
        recipe = Recipe(loss="cross-entropy", link="sigmoid")
        models.append(learner().distill(X[:8], targets, rng=generator(), recipe=recipe))
    np.testing.assert_array_equal(models[0].logits(X), models[1].logits(X))


def test_partial_fit_of_a_new_learner_is_a_fit() -> None:
    """Without parameters to continue from, only the number of epochs differs."""
    started = learner(epochs=9).partial_fit(X[:90], Y[:90], rng=generator(), epochs=2)
    fitted = learner(epochs=2).fit(X[:90], Y[:90], rng=generator())
    np.testing.assert_array_equal(started.logits(X), fitted.logits(X))


def test_several_labels_are_learned() -> None:
    """The four bits of a digit are read off new images, though half were unknown."""
    known = generator(1).uniform(size=BITS.shape) < 0.5
    labels = np.where(known, BITS, -1)
    model = of_labels(task="multi-label", epochs=20, learning_rate=5e-3)
    model.fit(X[:1200], labels[:1200], rng=generator())
    assert mean_auc(model.logits(X[1200:]), BITS[1200:]) > 0.95
    answers = model.predict(X[1200:])
    assert answers.dtype == np.int64
    np.testing.assert_array_equal(answers, model.logits(X[1200:]) > 0)
    assert (answers == BITS[1200:]).mean() > 0.9


def known_mean(logits: Array, labels: Array) -> float:
    terms = -np.where(labels == 1, log_expit(logits), log_expit(-logits))
    known = labels != -1
    return float(terms[known].mean()) if known.any() else 0.0


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    st.lists(
        st.lists(st.sampled_from([-1, 0, 1]), min_size=3, max_size=3), min_size=1, max_size=6
    )
)
def test_unknown_labels_have_no_part_in_the_loss(rows: list[list[int]]) -> None:
    """The loss is the mean over known labels, and 0 with gradient 0 where none is."""
    labels = np.array(rows)
    values = generator(len(rows)).normal(size=labels.shape)
    logits = torch.tensor(values, requires_grad=True)
    weights = torch.ones(len(rows)).double()
    loss = TASK_LOSSES["multi-label"](logits, torch.from_numpy(labels), weights)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert float(loss.detach()) == pytest.approx(known_mean(values, labels), abs=1e-12)
    np.testing.assert_array_equal(np.asarray(logits.grad) != 0, labels != -1)
    alone = RECORD_LOSSES["multi-label"](logits.detach(), torch.from_numpy(labels))
    expected = [known_mean(*pair) for pair in zip(values, labels, strict=True)]
    np.testing.assert_allclose(alone, expected, atol=1e-12)


def test_nothing_known_nothing_learned() -> None:
    """Labels that are all unknown leave the parameters alone."""
    model = of_labels(task="multi-label").fit(X[:50], BITS[:50], rng=generator())
    before = flat(model)
    model.partial_fit(X[:50], np.full((50, 4), -1), rng=generator(), epochs=2)
    np.testing.assert_array_equal(flat(model), before)


@pytest.mark.parametrize("outputs", [1, 3])
def test_numbers_are_learned(outputs: int) -> None:
    """A linear truth is found, and the answers are the outputs themselves."""
    truth = X @ generator(1).normal(size=(64, outputs))
    model = TorchLearner(
        lambda: nn.Linear(64, outputs),
        num_classes=outputs,
        task="regression",
        epochs=40,
        learning_rate=0.02,
    )
    model.fit(X[:1200], truth[:1200], rng=generator())
    np.testing.assert_array_equal(model.predict(X), model.logits(X))
    assert np.square(model.predict(X[1200:]) - truth[1200:]).mean() < 0.01 * truth.var()


@pytest.mark.parametrize(
    ("settings", "y"),
    [
        ({"task": "regression"}, BITS / 3),
        ({"task": "multi-label"}, (BITS - (generator().random(BITS.shape) < 0.3)).clip(-1)),
        ({"optimizer": "sgd", "learning_rate": 0.1, "schedule": "cosine"}, Y % 4),
    ],
)
def test_twins_of_every_kind_are_what_they_would_be_alone(
    settings: dict[str, Any], y: Array
) -> None:
    """Stacked or one after the other, twin i is the learner that fits set i."""
    sets = [(X[:40], y[:40]), (X[40:79], y[40:79]), (X[79:150], y[79:150])]
    assert_twins_match(of_labels(**settings), sets)


@pytest.mark.parametrize("final", [None, 0.0, 0.05])
def test_descent_along_a_cosine_is_the_textbook_loop(final: float | None) -> None:
    """SGD with momentum and a cosine gives what PyTorch's own scheduler gives."""
    model = learner(
        optimizer="sgd",
        learning_rate=0.2,
        momentum=0.7,
        schedule="cosine",
        batch_size=16,
        weight_decay=0.01,
        final_learning_rate=final,
    ).fit(X[:40], Y[:40], rng=generator())

    def descent(module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        sgd = torch.optim.SGD(module.parameters(), 0.2, momentum=0.7, weight_decay=0.01)
        least = 0.002 if final is None else final
        return sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 9, least)

    expected = textbook(Y[:40], optimizer_of=descent)
    np.testing.assert_allclose(model.logits(X), expected, atol=1e-4)


def test_the_schedule_is_over_one_call() -> None:
    """A call of one step is taken at the full rate, whatever the call before was."""
    models = [learner(schedule=kind, epochs=1) for kind in ("constant", "cosine")]
    for model in models:
        model.distill(X[:30], np.zeros((30, 10)), rng=generator())
        model.partial_fit(X[:30], Y[:30], rng=generator(1), epochs=1)
    np.testing.assert_array_equal(flat(models[0]), flat(models[1]))


VERBS: dict[str, Verb] = {
    "fit": lambda model: model.fit(X[:50], Y[:50], rng=generator(3)),
    "partial_fit": lambda model: model.partial_fit(X[:50], Y[:50], rng=generator(3), epochs=3),
    "distill": lambda model: model.distill(X[:50], np.zeros((50, 10)), rng=generator(3)),
    "fit_many": lambda model: model.fit_many(
        [(X[:50], Y[:50])] * 2, rngs=[generator(3), generator(4)]
    )[0],
}


def with_noise(rows: Tensor) -> Tensor:
    return rows.add_(torch.rand_like(rows))


@pytest.mark.parametrize("verb", VERBS)
def test_rows_are_changed_in_training_only(verb: str) -> None:
    """Every batch passes through `augment`, answers do not, and the caller's rows stay."""
    sizes: list[int] = []

    def noted(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return with_noise(rows)

    before = X.copy()
    model = VERBS[verb](learner(augment=noted))
    assert sizes == [32, 18] * (6 if verb == "fit_many" else 3)
    np.testing.assert_array_equal(model.logits(X), model.logits(X))
    assert len(sizes) in (6, 12)
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("verb", VERBS)
def test_changes_are_drawn_from_the_learners_generator(verb: str) -> None:
    """PyTorch's own seed has no effect on what an `augment` draws, and is left alone."""
    logits = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            logits.append(VERBS[verb](learner(augment=with_noise)).logits(X))
            assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.allclose(logits[0], VERBS[verb](learner()).logits(X))


def test_twins_with_changed_rows_are_those_of_fit() -> None:
    """Each twin draws from its own generator, and has the bits of a lonely one."""
    twin = VERBS["fit_many"](learner(augment=with_noise))
    alone = VERBS["fit"](learner(augment=with_noise))
    np.testing.assert_array_equal(twin.logits(X), alone.logits(X))


class Images(nn.Module):
    """A convolution that writes down how the rows lie in memory."""

    layouts: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)
        )

    def forward(self, rows: Tensor) -> Tensor:
        Images.layouts.append(rows.is_contiguous(memory_format=torch.channels_last))
        scores: Tensor = self.layers(rows)
        return scores


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_layout_of_images_changes_rounding_only(channels_last: bool) -> None:
    """Models are those of the plain layout, and repeat to the bit."""
    images = X[:60].reshape(60, 4, 4, 4)
    plain, laid, again = (
        # Adam would blow the rounding of a gradient that is nearly 0 up to a whole step.
        TorchLearner(Images, num_classes=10, epochs=2, channels_last=kind, optimizer="sgd")
        for kind in (False, channels_last, channels_last)
    )
    expected = plain.fit(images, Y[:60], rng=generator()).logits(images)
    Images.layouts.clear()
    laid.fit_many([(images, Y[:60])] * 2, rngs=[generator(), generator(1)])
    laid.fit(images, Y[:60], rng=generator())
    np.testing.assert_allclose(laid.logits(images), expected, atol=1e-5)
    assert set(Images.layouts) == {channels_last}
    again.fit(images, Y[:60], rng=generator())
    np.testing.assert_array_equal(again.logits(images), laid.logits(images))
    assert laid.to_arrays()["layers.0.weight"].flags.c_contiguous


def test_rows_that_are_no_images_keep_their_layout() -> None:
    """A learner of flat rows may be told to prefer a layout of images."""
    told = learner(channels_last=True).fit(X[:50], Y[:50], rng=generator())
    plain = learner().fit(X[:50], Y[:50], rng=generator())
    np.testing.assert_array_equal(told.logits(X), plain.logits(X))
