"""Networks of the papers, as plain PyTorch modules.

Every function takes the shape of a row and the number of outputs. Images are rows
(channels, height, width), grey or in colour, of any size that the layers leave a pixel of.
"""

import math
from collections.abc import Callable
from typing import Final, TypeAlias

from clients.encoders.named import import_torchvision
from fl_strategies.errors import MissingExtra, require
from simulations.data.texts import MAX_TOKENS, PADDING

try:
    import torch
    from torch import Tensor, nn
    from torch.func import functional_call
except ImportError as error:
    raise MissingExtra("networks", "torch", "torch") from error

Shape: TypeAlias = tuple[int, ...]
Network: TypeAlias = Callable[[Shape, int], nn.Module]

LENET_UNITS: Final = (120, 84)
MNIST_UNITS: Final = 512
RESNET8_CHANNELS: Final = (16, 32, 64)
VGG9_BLOCKS: Final = ((4,), (8,), (16, 16), (32, 32), (32, 32))
VGG9_WIDTH: Final = 8
DROPOUT: Final = 0.2
EMBEDDING_UNITS: Final = 64


def convolutional(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return FedKT's network: two 5 x 5 convolutions, then 120 and 84 units."""
    features = _convolutions(_channels("convolutional", row_shape), (6, 16))
    first, second = LENET_UNITS
    return nn.Sequential(
        features,
        nn.Linear(_num_outputs("convolutional", features, row_shape), first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, num_classes),
    )


def mnist_net(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return the network for MNIST of the authors of AvgKD: 16 and 32 filters of 5 x 5."""
    features = _convolutions(_channels("mnist-net", row_shape), (16, 32), padding=2)
    size = _num_outputs("mnist-net", features, row_shape)
    return nn.Sequential(features, nn.Linear(size, num_classes))


def _convolutions(channels: int, widths: tuple[int, ...], *, padding: int = 0) -> nn.Sequential:
    """Return convolutions of 5 x 5, each with ReLU and a pool that halves the image."""
    layers = list[nn.Module]()
    for width in widths:
        layers += [nn.Conv2d(channels, width, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())


def mnist_mlp(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return the other network for MNIST of AvgKD: two layers of 512 units with dropout."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(row_shape), MNIST_UNITS),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(MNIST_UNITS, MNIST_UNITS),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(MNIST_UNITS, num_classes),
    )


def vgg9(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return the network for CIFAR-10 of AvgKD: eight convolutions of 32 to 256 filters."""
    channels, layers = _channels("vgg9", row_shape), list[nn.Module]()
    for block in VGG9_BLOCKS:
        for filters in block:
            layers += [nn.Conv2d(channels, filters * VGG9_WIDTH, 3, padding=1), nn.ReLU()]
            channels = filters * VGG9_WIDTH
        # Rounding up leaves images of 28 pixels a last one, and changes nothing at 32.
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    features = nn.Sequential(*layers, nn.Flatten())
    size = _num_outputs("vgg9", features, row_shape)
    return _with_he_weights(nn.Sequential(features, nn.Linear(size, num_classes)))


def resnet8(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return the residual network of FedDF: one block each of 16, 32 and 64 channels.

    FedKD's code has the same blocks, eight times as wide.
    """
    channels = _channels("resnet8", row_shape)
    width = RESNET8_CHANNELS[0]
    layers = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
    blocks = list[nn.Module]()
    for wider in RESNET8_CHANNELS:
        blocks.append(_ResidualBlock(width, wider))
        width = wider
    return _with_he_weights(
        nn.Sequential(
            *layers,
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, num_classes),
        )
    )


def resnet34(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-34 without its first two reductions of size.

    They are meant for images of 224 pixels; the first convolution is 3 x 3 as usual for
    small ones.
    """
    channels = _channels("resnet34", row_shape)
    models = import_torchvision("resnet34").models
    network: nn.Module = models.resnet34(weights=None, num_classes=num_classes)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network


def fedmd_convolutional(
    widths: tuple[int, ...], row_shape: Shape, num_classes: int
) -> nn.Module:
    """Return one of FedMD's networks: two or three convolutions of the given widths.

    The last layer has no bias, as there. FedMD gives some of its networks more dropout than
    others; here it is 0.2 in all.
    """
    name = "-".join(map(str, ("cnn", len(widths), *widths)))
    channels = _channels(name, row_shape)
    # The average of neighbours at stride 1 keeps the size: the edge is its own neighbour.
    layers = [
        *_fedmd_layer(channels, widths[0], kernel=3, stride=1, padding=1),
        nn.ReplicationPad2d((0, 1, 0, 1)),
        nn.AvgPool2d(2, stride=1),
    ]
    if len(widths) == 3:
        layers += [*_fedmd_layer(widths[0], widths[1], kernel=2, stride=2), nn.AvgPool2d(2)]
    layers += _fedmd_layer(widths[-2], widths[-1], kernel=3, stride=2)
    features = nn.Sequential(*layers, nn.Flatten())
    size = _num_outputs(name, features, row_shape)
    return nn.Sequential(features, nn.Linear(size, num_classes, bias=False))


def _fedmd_layer(
    channels: int, width: int, *, kernel: int, stride: int, padding: int = 0
) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, width, kernel, stride=stride, padding=padding),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
    ]


def embedding_bag(row_shape: Shape, num_classes: int) -> nn.Module:
    """Return a text classifier: the mean of the words' vectors, then one hidden layer.

    Rows are word numbers below 10,000 (see `simulations.data.texts`), also when they come as
    floats; 0 is no word.
    """
    is_text = len(row_shape) == 1
    require(is_text, "embedding-bag", "a row", "a list of word numbers", row_shape)
    return nn.Sequential(
        _MeanEmbedding(),
        nn.Linear(EMBEDDING_UNITS, EMBEDDING_UNITS),
        nn.ReLU(),
        nn.Linear(EMBEDDING_UNITS, num_classes),
    )


class _MeanEmbedding(nn.Module):
    """The mean vector of the words of a text; a text without words is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(MAX_TOKENS, EMBEDDING_UNITS, padding_idx=PADDING)

    def forward(self, rows: Tensor) -> Tensor:
        numbers = rows.long()
        is_word = (numbers != PADDING).to(self.vectors.weight.dtype).unsqueeze(-1)
        total = (self.vectors(numbers) * is_word).sum(dim=-2)
        mean: Tensor = total / is_word.sum(dim=-2).clamp(min=1)
        return mean


class _ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a way past them; a wider block halves the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, rows: Tensor) -> Tensor:
        return torch.relu(self.main(rows) + self.shortcut(rows))


def _with_he_weights(network: nn.Module) -> nn.Module:
    """Draw the convolutions' weights as for ReLU, by the number of their outputs."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def _channels(owner: str, row_shape: Shape) -> int:
    is_image = len(row_shape) == 3
    require(is_image, owner, "a row", "an image (channels, height, width)", row_shape)
    return row_shape[0]


@torch.no_grad()
def _num_outputs(owner: str, features: nn.Module, row_shape: Shape) -> int:
    """Return how many numbers layers make of an image, by their shapes alone."""
    shapes = {name: value.to("meta") for name, value in features.state_dict().items()}
    try:
        # One image has no deviation that batch normalisation could learn.
        image = torch.empty(1, *row_shape, device="meta")
        length = int(functional_call(features.eval(), shapes, (image,)).numel())
    except RuntimeError:
        length = 0
    require(length > 0, owner, "a row", "an image large enough for all layers", row_shape)
    features.train()
    return length
