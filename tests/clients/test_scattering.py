"""Scattering against sums over pixels, against kymatio's figures, and against its theory."""

import numpy as np
import pytest

from clients import find_encoder
from clients.encoders.scattering import GRID, scatter
from fl_strategies._util import Array, FloatArray

SIDE, PADDED, BORDER = 28, 36, 4
DOWN, RIGHT = np.mgrid[:SIDE, :SIDE]
IMAGE = ((7 * DOWN + 13 * RIGHT + DOWN * RIGHT) % 17) / 16
NEAR = 1.01 * GRID


def on_a_torus(function: FloatArray, offsets: tuple[int, ...] = (-1, 0, 1)) -> Array:
    """Return copies of a function of shape (3 x 36, 3 x 36) laid over each other."""
    parts = [
        function[PADDED * (a + 1) : PADDED * (a + 2), PADDED * (b + 1) : PADDED * (b + 2)]
        for a in offsets
        for b in offsets
    ]
    total: Array = np.sum(parts, axis=0)
    return total


PLACES = np.arange(-PADDED, 2 * PADDED)
D, R = PLACES[:, np.newaxis], PLACES[np.newaxis]


def bell(sigma: float, theta: float, slant: float) -> FloatArray:
    """Return a Gaussian that is longer across the direction theta than along it."""
    along, across = D * np.cos(theta) + R * np.sin(theta), D * np.sin(theta) - R * np.cos(theta)
    density: FloatArray = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
    return density * slant / (2 * np.pi * sigma**2)


def wavelet(scale: int, angle: int) -> Array:
    """Return a Morlet wavelet of mean zero, by its formula."""
    theta, sigma = (3 - angle) * np.pi / 8, 0.8 * 2**scale
    envelope = bell(sigma, theta, 0.5)
    frequency = 0.75 * np.pi / 2**scale
    wave = envelope * np.exp(1j * frequency * (D * np.cos(theta) + R * np.sin(theta)))
    first, second = on_a_torus(wave), on_a_torus(envelope)
    return first - first.sum() / second.sum() * second


def convolve(image: Array, kernel: Array, step: int = 1) -> Array:
    """Return a circular convolution, sum by sum."""
    side = len(image)
    place = np.arange(side)
    return np.array(
        [
            [
                (image * kernel[np.ix_((d - place) % side, (r - place) % side)]).sum()
                for r in range(0, side, step)
            ]
            for d in range(0, side, step)
        ]
    )


def coarse_bell() -> FloatArray:
    """Return the blur for every second pixel: its slow frequencies, wave by wave."""
    blur = on_a_torus(bell(1.6, 0, 1.0))
    number = np.arange(PADDED)
    waves = np.exp(-2j * np.pi * np.outer(number, number) / PADDED)
    spectrum = waves @ blur @ waves.T
    slow = np.r_[0 : PADDED // 4, PADDED - PADDED // 4 : PADDED]
    half = PADDED // 2
    back = np.exp(2j * np.pi * np.outer(np.arange(half), np.arange(half)) / half) / half
    kept: FloatArray = (back @ spectrum[np.ix_(slow, slow)] @ back.T).real
    return kept


@pytest.fixture(scope="module")
def padded() -> FloatArray:
    """Return the image with its border mirrored, pixel by pixel."""
    mirror = [abs(i) if i < SIDE else 2 * (SIDE - 1) - i for i in range(-BORDER, SIDE + BORDER)]
    return IMAGE[np.ix_(mirror, mirror)]


def test_order_zero_is_a_blurred_image(padded: FloatArray) -> None:
    """Sampled at every fourth pixel."""
    expected = convolve(padded, on_a_torus(bell(1.6, 0, 1.0)), step=4)[1:-1, 1:-1]

    assert np.abs(scatter(IMAGE)[0] - expected).max() < NEAR


@pytest.mark.parametrize("angle", [0, 5])
def test_the_first_order_is_the_blurred_modulus(padded: FloatArray, angle: int) -> None:
    """Of a convolution with one wavelet; the coarse one is sampled before it is blurred."""
    fine = np.abs(convolve(padded, wavelet(0, angle)))
    expected = convolve(fine, on_a_torus(bell(1.6, 0, 1.0)), step=4)[1:-1, 1:-1]
    assert np.abs(scatter(IMAGE)[1 + angle] - expected).max() < NEAR

    coarse = np.abs(convolve(padded, wavelet(1, angle), step=2))
    expected = convolve(coarse, coarse_bell(), step=2)[1:-1, 1:-1]
    assert np.abs(scatter(IMAGE)[9 + angle] - expected).max() < NEAR


def test_the_second_order_is_filtered_twice(padded: FloatArray) -> None:
    """By a fine wavelet and then by a coarse one; channel 17 + 8 x first + second."""
    fine = np.abs(convolve(padded, wavelet(0, 2)))
    coarse = np.abs(convolve(fine, wavelet(1, 7), step=2))

    expected = convolve(coarse, coarse_bell(), step=2)[1:-1, 1:-1]
    assert np.abs(scatter(IMAGE)[17 + 8 * 2 + 7] - expected).max() < NEAR


KYMATIO = {
    (0, 0, 0): 0.4527239891118478,
    (1, 3, 4): 0.06274265474984711,
    (4, 6, 1): 0.07101179822917617,
    (8, 2, 2): 0.061351384100681916,
    (9, 0, 5): 0.015420165962026656,
    (13, 5, 3): 0.045677968689055264,
    (17, 1, 1): 0.004071344125467741,
    (40, 3, 3): 0.0033115295890130164,
    (63, 6, 0): 0.003429773068439935,
    (80, 4, 6): 0.012564040169195488,
}
"""Channel, row and column of kymatio 0.3.0 (NumPy, J=2, L=8), which rounds to float32."""


def test_numbers_are_kymatios() -> None:
    """Except for its rounding, and for a pi of 3.1415."""
    found = scatter(IMAGE)

    assert found.shape == (81, 7, 7)
    assert [found[place] for place in KYMATIO] == pytest.approx(
        [*KYMATIO.values()], rel=1e-4, abs=2 * GRID
    )


def test_a_shift_by_four_pixels_shifts_all_maps_by_one() -> None:
    """Where the border is empty."""
    image = np.zeros((SIDE, SIDE))
    image[8:16, 6:18] = np.random.default_rng(0).random((8, 12))
    still, moved = scatter(image), scatter(np.roll(image, (4, 4), axis=(0, 1)))

    assert np.abs(moved[:, 1:, 1:] - still[:, :-1, :-1]).max() < NEAR
    assert np.abs(moved - still).max() > 0.05


def test_features_are_never_further_apart_than_pixels() -> None:
    """Noise of strength e moves them by at most e; a pixel's shift moves them less."""
    rng = np.random.default_rng(1)
    image = rng.random((SIDE, SIDE))
    for strength in (0.01, 0.3):
        noisy = np.clip(image + strength * rng.normal(size=image.shape), 0, 1)
        border = np.pad(noisy - image, BORDER, "reflect")
        moved = 4 * np.linalg.norm(scatter(noisy) - scatter(image))
        assert 0 < moved <= np.linalg.norm(border)

    smooth = scatter(IMAGE)
    shifted = scatter(np.roll(IMAGE, 1, axis=1))
    assert 4 * np.linalg.norm(shifted - smooth) < np.linalg.norm(np.roll(IMAGE, 1, 1) - IMAGE)


def test_most_of_an_images_energy_is_kept() -> None:
    """The frequencies of the corners, and orders above the second, are what is lost."""
    image = np.zeros((SIDE, SIDE))
    image[8:20, 8:20] = np.exp(-((DOWN - 14) ** 2 + (RIGHT - 14) ** 2) / 8)[8:20, 8:20]

    kept = 16 * (scatter(image).astype(np.float64) ** 2).sum() / (image**2).sum()

    assert 0.75 < kept <= 1


@pytest.mark.parametrize(
    ("shape", "maps"),
    [
        ((64,), (81, 2, 2)),
        ((8, 8), (81, 2, 2)),
        ((28, 28, 1), (81, 7, 7)),
        ((3, 32, 32), (243, 8, 8)),
        ((32, 32, 3), (243, 8, 8)),
        ((30, 21), (81, 7, 5)),
    ],
)
def test_images_of_any_size_and_form(shape: tuple[int, ...], maps: tuple[int, ...]) -> None:
    """Channels, first or last, are scattered each by itself; flat rows are grey squares."""
    pixels = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)

    assert scatter(pixels).shape == maps
    assert scatter(pixels).tobytes() == scatter(pixels / np.float32(255)).tobytes()


def test_numbers_are_on_a_grid() -> None:
    """So processors that round in different ways give the same ones."""
    found = find_encoder("scattering").encode(IMAGE[np.newaxis])

    assert found.dtype == np.float32
    assert np.array_equal(found / GRID, np.round(found / GRID))
    assert find_encoder("scattering").encode(np.zeros((1, 8, 8))).tobytes() == bytes(81 * 16)
