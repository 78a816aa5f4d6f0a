import math
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.networks.learner import TorchLearner  # noqa: E402 - torch may be missing
from fl_strategies.errors import InvalidParameter  # noqa: E402
from simulations import networks  # noqa: E402
from simulations.config import Settings  # noqa: E402
from simulations.models import learner_factory  # noqa: E402

IMAGE_NETWORKS = {
    "convolutional": networks.convolutional,
    "mnist-net": networks.mnist_net,
    "mnist-mlp": networks.mnist_mlp,
    "vgg9": networks.vgg9,
    "resnet8": networks.resnet8,
    "resnet34": networks.resnet34,
    "cnn-2-8-16": partial(networks.fedmd_convolutional, (8, 16)),
    "cnn-3-8-16-32": partial(networks.fedmd_convolutional, (8, 16, 32)),
}
QUICK = Settings.of(epochs=6, batch_size=16, learning_rate=0.005)


def weights(network: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all convolutions and linear maps."""
    return [tuple(p.shape) for p in network.parameters() if p.ndim > 1]


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_images_of_both_kinds_get_their_outputs(name: str, shape: tuple[int, ...]) -> None:
    """Grey images of 28 pixels and coloured ones of 32 give one score a class."""
    network = IMAGE_NETWORKS[name](shape, 7)
    assert network.training
    with torch.no_grad():
        assert network(torch.randn(2, *shape)).shape == (2, 7)


def stripes(channels: int, side: int, size: int) -> tuple[Any, Any]:
    """Return noisy images with horizontal (0) or vertical (1) stripes."""
    rng = np.random.default_rng(0)
    y = np.arange(size) % 2
    wave = np.sign(np.sin(np.arange(side) * math.pi / 2 + 0.5))
    pattern = np.where(y[:, None, None] == 1, wave[None, None, :], wave[None, :, None])
    noise = rng.normal(0, 0.5, size=(size, channels, side, side))
    return (pattern[:, None] + noise).astype(np.float32), y


@pytest.mark.parametrize("name", [name for name in IMAGE_NETWORKS if name != "resnet34"])
def test_networks_by_name_learn(name: str) -> None:
    """A few passes over 80 images are enough to tell the direction of stripes."""
    side = 28 if name == "convolutional" else 12
    x, y = stripes(1, side, 120)
    settings = Settings.of(
        epochs=12 if name == "vgg9" else 6, batch_size=16, learning_rate=0.002
    )
    make = learner_factory(name, row_shape=x.shape[1:], num_classes=2, settings=settings)
    learner = make().fit(x[:80], y[:80], rng=np.random.default_rng(1))
    assert (learner.predict(x[80:]) == y[80:]).mean() > 0.8


def test_resnet34_is_trained_without_losing_its_pixels() -> None:
    """One step on 8 x 8 images works, and the first layers keep the size of an image."""
    x, y = stripes(1, 8, 8)
    settings = Settings.of(epochs=1, batch_size=8)
    make = learner_factory("resnet34", row_shape=(1, 8, 8), num_classes=2, settings=settings)
    assert make().fit(x, y, rng=np.random.default_rng(0)).logits(x).shape == (8, 2)
    network: Any = networks.resnet34((3, 32, 32), 5)
    early = network.maxpool(network.relu(network.bn1(network.conv1(torch.randn(1, 3, 32, 32)))))
    assert early.shape == (1, 64, 32, 32)


# Shapes of the papers


def test_fedkt_has_two_convolutions_and_three_linear_layers() -> None:
    """6 and 16 filters of 5 x 5, then 120, 84 and the classes."""
    layers = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 256), (84, 120), (10, 84)]
    assert weights(networks.convolutional((1, 28, 28), 10)) == layers
    assert (120, 400) in weights(networks.convolutional((3, 32, 32), 10))


def test_the_networks_of_avgkd_have_their_sizes() -> None:
    """16 and 32 filters for MNIST, 512 units twice, and 32 to 256 filters for CIFAR-10."""
    layers = [(16, 1, 5, 5), (32, 16, 5, 5), (10, 1568)]
    assert weights(networks.mnist_net((1, 28, 28), 10)) == layers
    assert weights(networks.mnist_mlp((1, 28, 28), 10)) == [(512, 784), (512, 512), (10, 512)]
    filters = [shape[0] for shape in weights(networks.vgg9((3, 32, 32), 10))]
    assert filters == [32, 64, 128, 128, 256, 256, 256, 256, 10]
    assert weights(networks.vgg9((3, 32, 32), 10))[-1] == (10, 256)


def test_resnet8_has_the_parameters_of_three_blocks() -> None:
    """Seven 3 x 3 convolutions, two shortcuts and a linear layer, counted by hand."""
    stem = 3 * 16 * 9 + 2 * 16
    first = 2 * (16 * 16 * 9 + 2 * 16)
    second = 16 * 32 * 9 + 32 * 32 * 9 + 16 * 32 + 3 * 2 * 32
    third = 32 * 64 * 9 + 64 * 64 * 9 + 32 * 64 + 3 * 2 * 64
    by_hand = stem + first + second + third + 64 * 10 + 10
    network = networks.resnet8((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == by_hand


def test_a_residual_block_passes_on_what_it_gets() -> None:
    """With its main path at zero a block of equal width is a ReLU of its input."""
    network: Any = networks.resnet8((1, 8, 8), 2)
    block = network[3]
    torch.nn.init.zeros_(block.main[-1].weight)
    rows = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(rows), rows.relu())


def test_fedmd_networks_take_their_widths_from_the_name() -> None:
    """Kernels are 3 and 3, or 3, 2 and 3 wide, and the last layer has no bias."""
    two = networks.fedmd_convolutional((128, 256), (1, 28, 28), 16)
    three = networks.fedmd_convolutional((64, 128, 256), (1, 28, 28), 16)
    assert weights(two) == [(128, 1, 3, 3), (256, 128, 3, 3), (16, 256 * 13 * 13)]
    filters = [(64, 1, 3, 3), (128, 64, 2, 2), (256, 128, 3, 3)]
    assert weights(three) == [*filters, (16, 256 * 3 * 3)]
    assert "1.bias" not in dict(two.named_parameters())


def test_the_average_of_neighbours_keeps_size_and_level() -> None:
    """At the edge only pixels of the image count, so a constant image stays constant."""
    network: Any = networks.fedmd_convolutional((1, 2), (1, 6, 6), 2)
    smooth = network[0][4:6]
    assert torch.allclose(smooth(torch.full((1, 1, 6, 6), 3.0)), torch.full((1, 1, 6, 6), 3.0))


@pytest.mark.parametrize("name", ["vgg9", "resnet8"])
def test_convolutions_start_with_a_spread_for_relu(name: str) -> None:
    """The deviation of a weight is the root of 2 over outputs times area."""
    network = IMAGE_NETWORKS[name]((3, 32, 32), 10)
    checked = 0
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            spread = float(module.weight.detach().std())
            assert spread == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("name", [name for name in IMAGE_NETWORKS if name != "mnist-mlp"])
def test_flat_rows_are_no_images(name: str) -> None:
    """Nor images texts: the sentence names the network and the shape it got."""
    message = rf"{name}: a row must be an image \(channels, height, width\), got \(784,\)"
    with pytest.raises(InvalidParameter, match=message):
        IMAGE_NETWORKS[name]((784,), 10)
    with pytest.raises(InvalidParameter, match=r"embedding-bag: a row must be a list of word"):
        networks.embedding_bag((1, 28, 28), 3)


@pytest.mark.parametrize("name", ["convolutional", "mnist-net", "cnn-2-8-16", "cnn-3-8-16-32"])
def test_an_image_can_be_too_small(name: str) -> None:
    """Layers that leave no pixel are refused when the network is made."""
    with pytest.raises(InvalidParameter, match="an image large enough for all layers"):
        IMAGE_NETWORKS[name]((1, 2, 2), 10)


def test_building_a_network_leaves_no_trace_of_the_blank_row() -> None:
    """Batch normalisation has seen nothing before training."""
    network = networks.fedmd_convolutional((4, 8), (1, 8, 8), 2)
    for name, buffer in network.named_buffers():
        assert float(buffer.sum()) == (buffer.numel() if name.endswith("var") else 0)


# Texts


def test_a_text_is_the_mean_of_its_words() -> None:
    """Order and padding do not count, floats are taken as numbers, and no word is zero."""
    network: Any = networks.embedding_bag((4,), 3)
    mean = network[0]
    rows = torch.tensor([[5.0, 9, 0, 0], [9.0, 0, 5, 0], [0.0, 0, 0, 0], [9999.0, 5, 5, 5]])
    vectors = mean.vectors.weight
    with torch.no_grad():
        result = mean(rows)
    assert torch.allclose(result[0], (vectors[5] + vectors[9]) / 2)
    assert torch.allclose(result[1], result[0])
    assert torch.equal(result[2], torch.zeros(64))
    assert torch.allclose(result[3], (vectors[9999] + 3 * vectors[5]) / 4)
    assert network(rows).shape == (4, 3)


def test_texts_are_told_apart_by_a_word() -> None:
    """Word 7 anywhere in a text decides its class."""
    rng = np.random.default_rng(0)
    x = rng.integers(10, 60, size=(200, 12))
    y = np.arange(200) % 2
    x[y == 1, rng.integers(12, size=200)[y == 1]] = 7
    make = learner_factory("embedding-bag", row_shape=(12,), num_classes=2, settings=QUICK)
    learner = make()
    assert isinstance(learner, TorchLearner)
    learner.fit(x[:150], y[:150], rng=np.random.default_rng(0))
    assert (learner.predict(x[150:]) == y[150:]).mean() > 0.9
