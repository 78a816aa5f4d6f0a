"""Wavelet scattering of small images: features for which nothing was learned.

An image is filtered by Morlet wavelets of eight directions and two scales, each result loses
its phase, the finer ones are filtered once more, and all are blurred and sampled: what is left
moves little if the image shifts or bends a little, and is never further from another image's
than the pixels are (Mallat, 2012; Bruna and Mallat, 2013). The filters are those of kymatio
(Andreux et al., 2020): sigma 0.8 x 2^j, frequency 3 pi / 4 x 2^-j, slant 4 / 8.

A channel of height h and width w gives 81 maps of h / 4 x w / 4: one of order zero, 16 of the
first and 64 of the second. Numbers are calculated in float64 and rounded to multiples of
2^-16, so that processors that round in different ways give the same.
"""

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from clients.encoders.encoder import as_image
from fl_strategies._util import FloatArray

NUM_SCALES: Final = 2
NUM_ANGLES: Final = 8
STEP: Final = 2**NUM_SCALES
"""Pixels between two samples of a map."""
NUM_MAPS: Final = 1 + NUM_SCALES * NUM_ANGLES + NUM_ANGLES**2
GRID: Final = 2.0**-16
VERSION: Final = f"1 J={NUM_SCALES} L={NUM_ANGLES} grid={GRID}"
_SIGMA: Final = 0.8
_FREQUENCY: Final = 3 * np.pi / 4
_SLANT: Final = 4 / NUM_ANGLES
_COPIES: Final = 2
"""On each side, of a filter that is laid out on a torus."""


def scatter(record: Any) -> FloatArray:
    """Return the scattering of an image, float32 (channels x 81, h / 4, w / 4)."""
    image = as_image(record).astype(np.float64)
    maps = np.concatenate([scatter_channel(channel) for channel in image])
    # Adding 0 makes the negative zero the usual one.
    return (np.round(maps / GRID) * GRID + 0.0).astype(np.float32)


def scatter_channel(pixels: FloatArray) -> FloatArray:
    """Return the maps (81, h / 4, w / 4) of one channel."""
    height, width = (_padded(length) for length in pixels.shape)
    fine, coarse = wavelets(height, width)
    border = [
        ((whole - length) // 2, whole - length - (whole - length) // 2)
        for length, whole in zip(pixels.shape, (height, width), strict=True)
    ]
    padded = np.pad(pixels, border, "reflect")
    spectrum = fft.fft2(padded)
    first_fine = np.abs(fft.ifft2(spectrum * fine))
    first_coarse = np.abs(fft.ifft2(_halved(spectrum * coarse)))
    again = _halved(fft.fft2(first_fine)[:, np.newaxis] * coarse)
    second = np.abs(fft.ifft2(again)).reshape(-1, height // 2, width // 2)
    maps = [
        _blurred(padded[np.newaxis]),
        _blurred(first_fine),
        _blurred(first_coarse, half=True),
        _blurred(second, half=True),
    ]
    return np.concatenate(maps)


def _padded(length: int) -> int:
    """Return the length with a border, of which the outermost samples are dropped again."""
    return ((length + STEP) // STEP + 1) * STEP


def _halved(spectra: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Return the spectra of every second sample in both directions."""
    *before, height, width = spectra.shape
    parts = spectra.reshape(*before, 2, height // 2, 2, width // 2)
    halved: NDArray[np.complex128] = parts.mean(axis=(-4, -2))
    return halved


def _blurred(maps: FloatArray, *, half: bool = False) -> FloatArray:
    """Return maps, perhaps of every second pixel, after the low-pass filter, sampled."""
    _, height, width = maps.shape
    rows, columns = (low_pass(length * (1 + half), half=half) for length in (height, width))
    blurred: FloatArray = rows @ maps @ columns.T
    return blurred


@functools.cache
def low_pass(length: int, *, half: bool) -> FloatArray:
    """Return the matrix that blurs a line of this length and samples it, without the ends.

    The filter is a product of two lines, so one matrix does for rows and columns. If `half`,
    it takes every second pixel, and the filter has no frequency that is lost with them.
    """
    spectrum = fft.fft(_line(length, _SIGMA * 2 ** (NUM_SCALES - 1))).real
    if half:
        spectrum[length // 4 : length // 4 + length // 2] = 0
        spectrum = spectrum[: length // 2] + spectrum[length // 2 :]
    impulse = fft.ifft(spectrum).real
    step = STEP // 2 if half else STEP
    return np.stack([np.roll(impulse, step * k) for k in range(1, length // STEP - 1)])


def _line(length: int, sigma: float) -> FloatArray:
    """Return a Gaussian on a circle."""
    places = np.arange(-_COPIES * length, (_COPIES + 1) * length)
    bell = np.exp(-(places**2) / (2 * sigma**2)) / np.sqrt(2 * np.pi * sigma**2)
    folded: FloatArray = bell.reshape(-1, length).sum(axis=0)
    return folded


@functools.cache
def wavelets(height: int, width: int) -> tuple[FloatArray, FloatArray]:
    """Return the spectra of the fine and of the coarse wavelets, (8, height, width) each."""
    fine, coarse = (
        np.stack([fft.fft2(morlet(height, width, j, t)).real for t in range(NUM_ANGLES)])
        for j in range(NUM_SCALES)
    )
    return fine, coarse


def morlet(height: int, width: int, scale: int, angle: int) -> NDArray[np.complex128]:
    """Return a wavelet on a torus: a wave in a Gaussian, less what makes its mean zero."""
    theta = (NUM_ANGLES // 2 - 1 - angle) * np.pi / NUM_ANGLES
    sigma, frequency = _SIGMA * 2**scale, _FREQUENCY / 2**scale
    wave = _gabor(height, width, sigma, theta, frequency)
    bell = _gabor(height, width, sigma, theta, 0)
    without_mean: NDArray[np.complex128] = wave - wave.sum() / bell.sum() * bell
    return without_mean


def _gabor(
    height: int, width: int, sigma: float, theta: float, frequency: float
) -> NDArray[np.complex128]:
    down, right = (
        np.arange(-_COPIES * length, (_COPIES + 1) * length) for length in (height, width)
    )
    along = np.cos(theta) * down[:, np.newaxis] + np.sin(theta) * right
    across = np.cos(theta) * right - np.sin(theta) * down[:, np.newaxis]
    bell = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * sigma**2))
    wave = bell * np.exp(1j * frequency * along) * _SLANT / (2 * np.pi * sigma**2)
    copies = 2 * _COPIES + 1
    folded: NDArray[np.complex128] = wave.reshape(copies, height, copies, width).sum((0, 2))
    return folded
