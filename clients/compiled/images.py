"""Convolutions and pooling of small images, compiled for the processor they run on.

Libraries for large networks take longer to move small images about than to multiply them. Here
the images of a batch lie side by side, pixel by pixel: arrays are (models, channels, height,
width * batch). A convolution then adds up rows that are shifted by whole batches, hundreds of
numbers at a time.
"""

from typing import Final

import numpy as np

from clients.compiled import fast_compiled
from fl_strategies._util import Array

TAPS: Final = 5
"""Height and width of the filters that the kernels are written for."""


@fast_compiled
def convolve(
    images: Array, filters: Array, biases: Array, border: int, out: Array, batch: int
) -> None:
    """Correlate images with filters (models, outputs, channels, 5, 5), two outputs at once.

    The border of zeros on the left and right is part of the images, that above and below is
    not: its rows add nothing.
    """
    length, height = out.shape[3], images.shape[2]
    for model in range(out.shape[0]):
        for o in range(0, out.shape[1], 2):
            for i in range(out.shape[2]):
                y, z = out[model, o, i], out[model, o + 1, i]
                y[:] = biases[model, o]
                z[:] = biases[model, o + 1]
                for c in range(images.shape[1]):
                    for r in range(max(0, border - i), min(TAPS, border + height - i)):
                        row = images[model, c, i + r - border]
                        f, g = filters[model, o, c, r], filters[model, o + 1, c, r]
                        f0, f1, f2, f3, f4 = f[0], f[1], f[2], f[3], f[4]
                        g0, g1, g2, g3, g4 = g[0], g[1], g[2], g[3], g[4]
                        row0, row1 = row[:length], row[batch : batch + length]
                        row2 = row[2 * batch : 2 * batch + length]
                        row3 = row[3 * batch : 3 * batch + length]
                        row4 = row[4 * batch : 4 * batch + length]
                        for t in range(length):
                            x0, x1, x2, x3, x4 = row0[t], row1[t], row2[t], row3[t], row4[t]
                            y[t] += f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3 + f4 * x4
                            z[t] += g0 * x0 + g1 * x1 + g2 * x2 + g3 * x3 + g4 * x4


@fast_compiled
def filter_gradients(
    images: Array, slopes: Array, border: int, filters: Array, biases: Array, batch: int
) -> None:
    """Write the gradients of filters and biases, given those of what `convolve` returned."""
    zero = np.float32(0)
    length, height = slopes.shape[3], images.shape[2]
    for model in range(slopes.shape[0]):
        for o in range(0, slopes.shape[1], 2):
            for c in range(images.shape[1]):
                for r in range(TAPS):
                    f0 = f1 = f2 = f3 = f4 = g0 = g1 = g2 = g3 = g4 = zero
                    last = min(slopes.shape[2], height + border - r)
                    for i in range(max(0, border - r), last):
                        y, z = slopes[model, o, i], slopes[model, o + 1, i]
                        row = images[model, c, i + r - border]
                        row0, row1 = row[:length], row[batch : batch + length]
                        row2 = row[2 * batch : 2 * batch + length]
                        row3 = row[3 * batch : 3 * batch + length]
                        row4 = row[4 * batch : 4 * batch + length]
                        for t in range(length):
                            x0, x1, x2, x3, x4 = row0[t], row1[t], row2[t], row3[t], row4[t]
                            f0 += y[t] * x0
                            f1 += y[t] * x1
                            f2 += y[t] * x2
                            f3 += y[t] * x3
                            f4 += y[t] * x4
                            g0 += z[t] * x0
                            g1 += z[t] * x1
                            g2 += z[t] * x2
                            g3 += z[t] * x3
                            g4 += z[t] * x4
                    f, g = filters[model, o, c, r], filters[model, o + 1, c, r]
                    f[0], f[1], f[2], f[3], f[4] = f0, f1, f2, f3, f4
                    g[0], g[1], g[2], g[3], g[4] = g0, g1, g2, g3, g4
            for one in (o, o + 1):
                total = zero
                for i in range(slopes.shape[2]):
                    y = slopes[model, one, i]
                    for t in range(length):
                        total += y[t]
                biases[model, one] = total


@fast_compiled
def pool(images: Array, floor: np.float32, out: Array, batch: int) -> None:
    """Take the largest of 2 x 2 pixels and the floor, which is 0 where ReLU comes along."""
    for model in range(out.shape[0]):
        for c in range(out.shape[1]):
            for i in range(out.shape[2]):
                upper, lower = images[model, c, 2 * i], images[model, c, 2 * i + 1]
                for j in range(0, out.shape[3], batch):
                    a, b = upper[2 * j :][:batch], upper[2 * j + batch :][:batch]
                    d, e = lower[2 * j :][:batch], lower[2 * j + batch :][:batch]
                    y = out[model, c, i, j : j + batch]
                    for t in range(batch):
                        y[t] = max(max(max(a[t], b[t]), max(d[t], e[t])), floor)


@fast_compiled
def pool_gradients(
    images: Array, pooled: Array, floor: np.float32, slopes: Array, out: Array, batch: int
) -> None:
    """Give a gradient to the first pixel that `pool` could take, if it is above the floor."""
    zero = np.float32(0)
    for model in range(pooled.shape[0]):
        for c in range(pooled.shape[1]):
            for i in range(pooled.shape[2]):
                upper, lower = images[model, c, 2 * i], images[model, c, 2 * i + 1]
                above, below = out[model, c, 2 * i], out[model, c, 2 * i + 1]
                for j in range(0, pooled.shape[3], batch):
                    a, b = upper[2 * j :][:batch], upper[2 * j + batch :][:batch]
                    d = lower[2 * j :][:batch]
                    at_a, at_b = above[2 * j :][:batch], above[2 * j + batch :][:batch]
                    at_d, at_e = below[2 * j :][:batch], below[2 * j + batch :][:batch]
                    y = pooled[model, c, i, j : j + batch]
                    slope = slopes[model, c, i, j : j + batch]
                    for t in range(batch):
                        given = slope[t] if y[t] > floor else zero
                        is_a = a[t] == y[t]
                        is_b = (b[t] == y[t]) and not is_a
                        is_d = (d[t] == y[t]) and not (is_a or is_b)
                        at_a[t] = given if is_a else zero
                        at_b[t] = given if is_b else zero
                        at_d[t] = given if is_d else zero
                        at_e[t] = zero if (is_a or is_b or is_d) else given
