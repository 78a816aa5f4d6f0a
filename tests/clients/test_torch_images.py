"""Small convolutional networks by compiled kernels, and images that move in training."""

import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.networks.images import ImageStack, crop_and_flip, image_layers
from clients.networks.learner import TorchLearner
from clients.networks.stacks import ModuleStack, accelerated, make_stack
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.networks import convolutional, mnist_net

CLASSES = 10


def _odd(row_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Pooling without ReLU, of odd sizes, and ReLU without pooling."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(row_shape[0], 4, 5, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        nn.Conv2d(4, 2, 5, padding=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * 17 * 17, num_classes),
    )


NETWORKS = {
    "lenet": (convolutional, (1, 28, 28)),
    "colour": (convolutional, (3, 32, 32)),
    "padded": (mnist_net, (1, 28, 28)),
    "odd": (_odd, (3, 29, 29)),
}


def _rows(name: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, *NETWORKS[name][1], generator=generator)


def _modules(name: str, count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    network, shape = NETWORKS[name]
    return [network(shape, CLASSES) for _ in range(count)]


def _gradients(scores: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    labels = torch.arange(len(scores)) % CLASSES
    loss = cross_entropy(scores, labels)
    return list(torch.autograd.grad(loss, parameters, retain_graph=True))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_computes_what_its_modules_compute(name: str, count: int) -> None:
    modules, rows = _modules(name, count), _rows(name, 6 * count)
    stack = ImageStack.of(modules)
    assert stack is not None
    alone = torch.cat([m(some) for m, some in zip(modules, rows.chunk(count), strict=True)])
    torch.testing.assert_close(stack(rows), alone, rtol=1e-4, atol=1e-5)
    expected = [
        torch.stack(_gradients(alone, [m.get_parameter(key) for m in modules]))
        for key, _ in modules[0].named_parameters()
    ]
    found = _gradients(stack(rows), list(stack.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.view_as(other), other, rtol=1e-4, atol=1e-5)


def test_where_pixels_are_equal_the_gradient_is_pytorchs() -> None:
    modules = _modules("lenet", 1)
    rows, stack = torch.zeros(2, 1, 28, 28), ImageStack.of(modules)
    assert stack is not None
    weights = list(modules[0].parameters())
    expected = _gradients(modules[0](rows), weights)
    for one, other in zip(_gradients(stack(rows), weights), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_trained_parameters_come_back() -> None:
    modules = _modules("lenet", 2)
    stack = make_stack(modules)
    assert isinstance(stack, ImageStack)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(1.0)
    before = [p.clone() for p in modules[1].parameters()]
    stack.write_back()
    for old, new in zip(before, modules[1].parameters(), strict=True):
        torch.testing.assert_close(new, old + 1.0)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 10)),
        nn.Sequential(nn.Conv2d(1, 3, 5), nn.Flatten(), nn.Linear(3 * 24 * 24, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5, stride=2), nn.Flatten(), nn.Linear(2 * 12 * 12, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5, padding="same"), nn.Flatten(), nn.Linear(1568, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(128, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Tanh(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Linear(24, 10), nn.Flatten()),
        nn.Sequential(nn.Conv2d(1, 2, 5, bias=False), nn.Flatten(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(1152, 10)).double(),
    ],
)
def test_other_networks_are_left_to_pytorch(module: nn.Module) -> None:
    assert image_layers(module) is None
    assert accelerated(module) is module


def test_a_watched_network_is_left_to_pytorch() -> None:
    module = _modules("lenet", 1)[0]
    module.get_submodule("1").register_forward_hook(lambda *_: None)
    assert image_layers(module) is None


@pytest.mark.usefixtures("without_numba")
def test_without_numba_pytorch_computes() -> None:
    assert isinstance(make_stack(_modules("lenet", 2)), ModuleStack)


@pytest.mark.parametrize("shape", [(2, 28, 28), (1, 4, 28), (1, 28, 4)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    stack = ImageStack.of(_modules("lenet", 1))
    assert stack is not None
    with pytest.raises((ValueError, RuntimeError)):
        stack(torch.zeros(3, *shape))


def test_a_stacked_learner_is_the_one_that_learns_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((70, 1, 28, 28), dtype=np.float32)
    y = rng.integers(0, CLASSES, 70)
    learner = TorchLearner(
        lambda: convolutional((1, 28, 28), CLASSES),
        num_classes=CLASSES,
        epochs=2,
        channels_last=True,
    )
    twins = learner.fit_many(
        [(x, y), (x, y[::-1].copy())], rngs=[np.random.default_rng(i) for i in (1, 2)]
    )
    alone = learner.fit(x, y, rng=np.random.default_rng(1))
    np.testing.assert_allclose(twins[0].logits(x), alone.logits(x), rtol=1e-3, atol=1e-5)
    assert not np.allclose(twins[1].logits(x), alone.logits(x), atol=1e-3)


# --- crop_and_flip ------------------------------------------------------------------------


def seeded(images: Tensor, padding: int = 4, flip: bool = True, seed: int = 0) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return crop_and_flip(padding, flip)(images)


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """Return an image (C, H, W) moved by so many pixels, with zeros where nothing was."""
    moved = torch.zeros_like(image)
    height, width = image.shape[1:]
    for row in range(max(0, down), min(height, height + down)):
        for column in range(max(0, right), min(width, width + right)):
            moved[:, row, column] = image[:, row - down, column - right]
    return moved


def possible(image: Tensor, padding: int, flip: bool) -> list[Tensor]:
    shifts = range(-padding, padding + 1)
    whole = [image, image.flip(2)] if flip else [image]
    return [
        # Shifts of the mirror image are also the mirror images of shifts.
        shifted(start, down, right)
        for start in whole
        for down in shifts
        for right in shifts
    ]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    channels=st.integers(1, 3),
    padding=st.integers(0, 3),
    flip=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_image_is_a_shift_of_itself(
    height: int, width: int, channels: int, padding: int, flip: bool, seed: int
) -> None:
    """All channels of an image move together, to one of the allowed places."""
    images = torch.from_numpy(
        np.random.default_rng(seed).uniform(1, 2, (4, channels, height, width))
    )
    for image, changed in zip(images, seeded(images, padding, flip, seed), strict=True):
        assert any(torch.equal(changed, other) for other in possible(image, padding, flip))


def test_all_shifts_and_both_sides_occur_equally_often() -> None:
    """Of 25 shifts and two sides each comes with its share, image by image."""
    image = torch.rand(1, 4, 5) + 1
    changed = seeded(image.expand(6000, 1, 4, 5), padding=2)
    counts = [
        int((changed == other).flatten(1).all(dim=1).sum())
        for other in possible(image, 2, flip=True)
    ]
    assert sum(counts) == 6000
    assert min(counts) > 120 - 6 * 11  # six standard deviations
    assert max(counts) < 120 + 6 * 11


def test_the_given_images_are_left_alone() -> None:
    """A new tensor is returned, of the same shape and type, also of none."""
    images = torch.rand(8, 3, 6, 6)
    before = images.clone()
    changed = seeded(images)
    assert torch.equal(images, before)
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert not torch.equal(changed, images)
    assert seeded(images[:0]).shape == (0, 3, 6, 6)


def test_draws_come_from_the_default_generator() -> None:
    """Equal seeds give equal images, and the memory layout plays no part."""
    images = torch.rand(32, 3, 8, 8)
    assert torch.equal(seeded(images, seed=1), seeded(images, seed=1))
    assert not torch.equal(seeded(images, seed=1), seeded(images, seed=2))
    laid = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(seeded(images, seed=1), seeded(laid, seed=1))


def test_can_be_sent_to_another_process() -> None:
    """Workers get the same changes."""
    images = torch.rand(9, 1, 5, 5)
    sent = pickle.loads(pickle.dumps(crop_and_flip(2)))  # noqa: S301
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert torch.equal(sent(images), seeded(images, 2))


def test_a_batch_takes_a_moment() -> None:
    """No loop over images: a thousand of them in far less than a loop would take."""
    images = torch.rand(1000, 3, 32, 32)
    seeded(images)
    start = time.process_time()
    seeded(images)
    assert time.process_time() - start < 0.5


def test_rows_that_are_no_images_and_wrong_padding_are_named() -> None:
    """The sentence says what came instead."""
    for padding in (-1, 1.5):
        with pytest.raises(
            InvalidParameter, match="padding must be a whole number, at least 0"
        ):
            crop_and_flip(padding)  # type: ignore[arg-type]
    with pytest.raises(InvalidData, match=r"images \(channels, .*, got rows of shape \(64,\)"):
        crop_and_flip()(torch.zeros(3, 64))


def test_helps_where_objects_move() -> None:
    """A learner that saw every object in one place finds it elsewhere, if it was moved."""
    rng = np.random.default_rng(0)
    shapes = (rng.uniform(size=(4, 1, 4, 4)) < 0.5).astype(np.float32)
    y = np.tile(np.arange(4), 16)
    x = np.zeros((64, 1, 8, 8), np.float32)
    x[:, :, 2:6, 2:6] = shapes[y]
    moved = np.roll(x, (2, -2), axis=(2, 3))

    def module_fn() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    scores = []
    for augment in (None, crop_and_flip(2, flip=False)):
        model = TorchLearner(
            module_fn, num_classes=4, epochs=60, learning_rate=1e-2, augment=augment
        )
        model.fit(x, y, rng=np.random.default_rng(1))
        scores.append((model.predict(moved) == y).mean())
    assert scores[1] == 1.0 > scores[0]
