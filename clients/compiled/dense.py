"""Training of perceptrons on sparse rows, compiled for the processor it runs on.

Most pixels of a digit are black and most columns of a coded table are 0. The first layer, where
most of the weights are, adds up what the others say: forwards the weights of a row's inputs,
backwards the slopes of the rows that have an input. The gradient of an input's weights goes
straight from registers into Adam, so it is never written. One call trains one model for an
epoch: its weights and Adam's moments about fit into the cache next to a core, those of a stack
do not.

Weights lie as (inputs, units), with units rounded up to whole vectors (see `lanes`):
what is beyond is 0 and stays 0. All layers are parts of one flat array, and so are what they
make of a batch and the slopes of that. Numba compiles once for each width of the first layer,
in some seconds, and keeps the result beside this file or in the user's cache.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from clients.compiled import fast_compiled, fast_part
from clients.compiled.lanes import WIDTH, kept_above, load, root, store, take, transpose, zeros
from fl_strategies._util import Array

LABELS, SHARES, L1, L2, SQUARES = range(5)
"""The objective: the cross-entropy of labels or of class shares, or a norm."""

_ZERO, _UNIT, _TWO = np.float32(0), np.float32(1), np.float32(2)


class Goal(NamedTuple):
    """The target of learning: labels int64 (n,) or targets float32 (n, classes)."""

    kind: int
    of_shares: bool
    temperature: Any
    labels: Array
    targets: Array


@fast_part
def write_slopes(goal: Goal, row: int, scores: Array, share: Any, slopes: Array) -> None:
    """Write the gradient of a row's share of the loss."""
    if goal.kind == LABELS:
        _softmax(scores, goal.temperature, share, slopes)
        slopes[goal.labels[row]] -= share
    elif goal.kind == SHARES:
        targets, part = goal.targets[row], share / goal.temperature
        mass = _ZERO
        for c in range(len(targets)):
            mass += targets[c]
        _softmax(scores, goal.temperature, part * mass, slopes)
        for c in range(len(slopes)):
            slopes[c] -= part * targets[c]
    elif goal.of_shares:
        _softmax(scores, goal.temperature, _UNIT, slopes)
        _through_softmax(goal.kind, goal.targets[row], share / goal.temperature, slopes)
    else:
        targets = goal.targets[row]
        length = _distance(scores, targets)
        for c in range(len(slopes)):
            slope = _norm_slope(goal.kind, scores[c] - targets[c], length, len(slopes))
            slopes[c] = share * slope


@fast_part
def _softmax(scores: Array, temperature: Any, mass: Any, out: Array) -> None:
    """Write shares of a mass."""
    top, total = scores[0], _ZERO
    for c in range(len(out)):
        top = max(top, scores[c])
    for c in range(len(out)):
        out[c] = np.exp((scores[c] - top) / temperature)
        total += out[c]
    for c in range(len(out)):
        out[c] *= mass / total


@fast_part
def _through_softmax(kind: int, targets: Array, share: Any, slopes: Array) -> None:
    """Turn shares of classes into the slopes of scores, by those of a norm."""
    length, mean = _distance(slopes, targets), _ZERO
    for c in range(len(slopes)):
        away = slopes[c] - targets[c]
        mean += slopes[c] * _norm_slope(kind, away, length, len(slopes))
    for c in range(len(slopes)):
        away = slopes[c] - targets[c]
        slopes[c] *= share * (_norm_slope(kind, away, length, len(slopes)) - mean)


@fast_part
def _distance(outputs: Array, targets: Array) -> Any:
    total = _ZERO
    for c in range(len(outputs)):
        total += (outputs[c] - targets[c]) * (outputs[c] - targets[c])
    return np.sqrt(total)


@fast_part
def _norm_slope(kind: int, away: Any, length: Any, size: int) -> Any:
    """Return the slope of a norm in one direction: 0 at 0, as PyTorch has it."""
    if kind == L1:
        return np.sign(away) / np.float32(size)
    if kind == SQUARES:
        return _TWO * away / np.float32(size)
    return away / length if length > 0 else _ZERO


ROWS_AT_ONCE: Final = 4

_ONE: Final = (0,)
_KEPT_MEAN, _NEW_MEAN = np.float32(0.9), np.float32(1 - 0.9)
_KEPT_SQUARE, _NEW_SQUARE = np.float32(0.999), np.float32(1 - 0.999)
_EPSILON: Final = np.float32(1e-8)


class Rows(NamedTuple):
    """Rows that differ from a background in few places, row after row."""

    starts: Array
    """uint64 (n + 1,): where the places of every row begin, and where the last ends."""
    places: Array
    """uint32: the inputs that differ."""
    values: Array
    """float32: by how much."""
    background: Array
    """float32 (inputs,)"""


class Layers(NamedTuple):
    """Sizes of every layer, int64 (L,), and where its parts are in flat arrays."""

    inputs: Array
    units: Array
    widths: Array
    floors: Array
    """float32: 0 where ReLU follows, -infinity elsewhere."""
    weights: Array
    biases: Array
    results: Array
    turned: Array


class Learned(NamedTuple):
    """Weights with the running means of their gradients and of these squared."""

    values: Array
    means: Array
    squares: Array


class Steps(NamedTuple):
    """Step sizes of an epoch."""

    rates: Array
    """float32: step size over the correction of the mean."""
    roots: Array
    """float32: 1 over the root of the correction of the squares."""
    decay: Any


class Scratch(NamedTuple):
    """Space for one step, of any model of an architecture."""

    results: Array
    slopes: Array
    turned: Array
    sums: Array
    ends: Array
    holders: Array
    found: Array


@fast_compiled
def train(
    strip: tuple[int, ...],
    rows: Rows,
    goal: Goal,
    learned: Learned,
    order: Array,
    stops: Array,
    layers: Layers,
    steps: Steps,
    scratch: Scratch,
) -> None:
    """Take the steps of an epoch: batches of rows in this order, up to these stops."""
    start = 0
    for step in range(len(stops)):
        batch = order[start : stops[step]]
        start = stops[step]
        _first_results(strip, rows, batch, layers, learned.values, scratch)
        padded = _padded(len(batch))
        for layer in range(1, len(layers.units)):
            _results(layer, padded, layers, learned.values, scratch)
        _slopes_of_scores(goal, batch, layers, scratch)
        pace = steps.rates[step], steps.roots[step], steps.decay
        for layer in range(len(layers.units) - 1, 0, -1):
            _slopes(layer, padded, layers, learned.values, scratch)
            _update(layer, len(batch), layers, learned, pace, scratch)
        _turn(rows, batch, layers.widths[0], scratch)
        _update_first(strip, len(batch), rows, layers, learned, pace, scratch)


@fast_part
def _padded(count: int) -> int:
    """Return a number of rows in whole fours; nothing reads what becomes of the last ones."""
    return (count + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE


@fast_part
def _first_results(
    strip: tuple[int, ...],
    rows: Rows,
    batch: Array,
    layers: Layers,
    values: Array,
    scratch: Scratch,
) -> None:
    """Write what the first layer makes of rows; count the rows of every input."""
    width, floor = layers.widths[0], layers.floors[0]
    starts, places, found = rows.starts, rows.places, rows.values
    counts, out = scratch.ends, scratch.results
    counts[:] = 0
    _add_background(strip, rows.background, layers, values, scratch.sums)
    for r in range(len(batch)):
        first, last = starts[batch[r]], starts[batch[r] + 1]
        for k in range(first, last):
            counts[places[k]] += 1
        for j in range(0, width, WIDTH * len(strip)):
            y = load(strip, scratch.sums, j)
            for k in range(first, last):
                y = y + found[k] * load(strip, values, places[k] * width + j)
            store(out, r * width + j, kept_above(y, y, floor, _ZERO))


@fast_part
def _add_background(
    strip: tuple[int, ...], background: Array, layers: Layers, values: Array, out: Array
) -> None:
    """Write what the first layer makes of a row that is all background."""
    width = layers.widths[0]
    for j in range(0, width, WIDTH * len(strip)):
        y = load(strip, values, layers.biases[0] + j)
        for i in range(len(background)):
            if background[i] != 0:
                y = y + background[i] * load(strip, values, i * width + j)
        store(out, j, y)


@fast_part
def _sums(
    x: Array, at: int, across: int, along: int, y: Array, start: int, width: int, count: int
) -> tuple[Any, Any, Any, Any]:
    """Add up ``x[i, k] * y[k]`` over `count` vectors y, for four i at once."""
    a = b = c = d = zeros(_ONE)
    for k in range(count):
        z, one = load(_ONE, y, start + k * width), at + k * along
        a = a + take(x, one) * z
        b = b + take(x, one + across) * z
        c = c + take(x, one + 2 * across) * z
        d = d + take(x, one + 3 * across) * z
    return a, b, c, d


@fast_part
def _results(layer: int, padded: int, layers: Layers, values: Array, scratch: Scratch) -> None:
    """Write what a later layer makes of the results before it."""
    width, gap, out = layers.widths[layer], layers.widths[layer - 1], scratch.results
    floor, inputs = layers.floors[layer], layers.inputs[layer]
    for r in range(0, padded, ROWS_AT_ONCE):
        source = layers.results[layer - 1] + r * gap
        for j in range(0, width, WIDTH):
            bias = load(_ONE, values, layers.biases[layer] + j)
            start = layers.weights[layer] + j
            a, b, c, d = _sums(out, source, gap, 1, values, start, width, inputs)
            a, b, c, d = a + bias, b + bias, c + bias, d + bias
            at = layers.results[layer] + r * width + j
            store(out, at, kept_above(a, a, floor, _ZERO))
            store(out, at + width, kept_above(b, b, floor, _ZERO))
            store(out, at + 2 * width, kept_above(c, c, floor, _ZERO))
            store(out, at + 3 * width, kept_above(d, d, floor, _ZERO))


@fast_part
def _slopes(layer: int, padded: int, layers: Layers, values: Array, scratch: Scratch) -> None:
    """Write the slopes of the results that a layer takes, from those of what it gives."""
    width, gap = layers.widths[layer], layers.widths[layer - 1]
    units, floor = layers.units[layer], layers.floors[layer - 1]
    turned, slopes, results = scratch.turned, scratch.slopes, scratch.results
    first = layers.turned[layer]
    for i in range(0, gap, WIDTH):
        for j in range(0, width, WIDTH):
            at = layers.weights[layer] + i * width + j
            transpose(values, at, width, turned, first + j * gap + i, gap)
    for r in range(0, padded, ROWS_AT_ONCE):
        source = layers.results[layer] + r * width
        for j in range(0, gap, WIDTH):
            a, b, c, d = _sums(slopes, source, width, 1, turned, first + j, gap, units)
            at = layers.results[layer - 1] + r * gap + j
            _keep(a, at, floor, results, slopes)
            _keep(b, at + gap, floor, results, slopes)
            _keep(c, at + 2 * gap, floor, results, slopes)
            _keep(d, at + 3 * gap, floor, results, slopes)


@fast_part
def _keep(slope: Any, at: int, floor: Any, results: Array, slopes: Array) -> None:
    """Write a slope where ReLU lets it through."""
    store(slopes, at, kept_above(slope, load(_ONE, results, at), floor, _ZERO))


@fast_part
def _update(
    layer: int,
    count: int,
    layers: Layers,
    learned: Learned,
    pace: tuple[Any, Any, Any],
    scratch: Scratch,
) -> None:
    """Take a step of a later layer."""
    width, gap = layers.widths[layer], layers.widths[layer - 1]
    results, slopes = scratch.results, scratch.slopes
    source, given = layers.results[layer - 1], layers.results[layer]
    _add_up(layer, count, layers, slopes, scratch.sums)
    for i in range(0, layers.inputs[layer], ROWS_AT_ONCE):
        for j in range(0, width, WIDTH):
            a, b, c, d = _sums(results, source + i, 1, gap, slopes, given + j, width, count)
            at = layers.weights[layer] + i * width + j
            _adam(learned, at, a, pace)
            _adam(learned, at + width, b, pace)
            _adam(learned, at + 2 * width, c, pace)
            _adam(learned, at + 3 * width, d, pace)
    for j in range(0, width, WIDTH):
        _adam(learned, layers.biases[layer] + j, load(_ONE, scratch.sums, j), pace)


@fast_part
def _add_up(layer: int, count: int, layers: Layers, slopes: Array, out: Array) -> None:
    """Write the sums of slopes over rows, which are the gradient of the biases."""
    width = layers.widths[layer]
    for j in range(0, width, WIDTH):
        total = zeros(_ONE)
        for r in range(count):
            total = total + load(_ONE, slopes, layers.results[layer] + r * width + j)
        store(out, j, total)


@fast_part
def _turn(rows: Rows, batch: Array, width: int, scratch: Scratch) -> None:
    """List what a batch has by input instead of by row; `ends` has the counts before."""
    starts, places, values = rows.starts, rows.places, rows.values
    ends, holders, found = scratch.ends, scratch.holders, scratch.found
    total = np.uint32(0)
    for i in range(len(ends)):
        count = ends[i]
        ends[i] = total
        total += count
    for r in range(len(batch)):
        for k in range(starts[batch[r]], starts[batch[r] + 1]):
            at = ends[places[k]]
            holders[at] = r * width
            found[at] = values[k]
            ends[places[k]] = at + 1


@fast_part
def _update_first(
    strip: tuple[int, ...],
    count: int,
    rows: Rows,
    layers: Layers,
    learned: Learned,
    pace: tuple[Any, Any, Any],
    scratch: Scratch,
) -> None:
    """Take a step of the first layer, input by input."""
    width, slopes, sums = layers.widths[0], scratch.slopes, scratch.sums
    ends, holders, found = scratch.ends, scratch.holders, scratch.found
    _add_up(0, count, layers, slopes, sums)
    start = 0
    for i in range(len(ends)):
        for j in range(0, width, WIDTH * len(strip)):
            y = rows.background[i] * load(strip, sums, j)
            for k in range(start, ends[i]):
                y = y + found[k] * load(strip, slopes, holders[k] + j)
            store(sums, width + j, y)
        start = ends[i]
        for j in range(0, width, WIDTH):
            _adam(learned, i * width + j, load(_ONE, sums, width + j), pace)
    for j in range(0, width, WIDTH):
        _adam(learned, layers.biases[0] + j, load(_ONE, sums, j), pace)


@fast_part
def _adam(learned: Learned, at: int, gradient: Any, pace: tuple[Any, Any, Any]) -> None:
    """Take Adam's step of one vector of weights, with the gradient of the penalty."""
    rate, correction, decay = pace
    value = load(_ONE, learned.values, at)
    slope = gradient + decay * value
    mean = _KEPT_MEAN * load(_ONE, learned.means, at) + _NEW_MEAN * slope
    square = _KEPT_SQUARE * load(_ONE, learned.squares, at) + _NEW_SQUARE * slope * slope
    store(learned.means, at, mean)
    store(learned.squares, at, square)
    step = rate * mean / (correction * root(square) + _EPSILON)
    store(learned.values, at, value - step)


@fast_part
def _slopes_of_scores(goal: Goal, batch: Array, layers: Layers, scratch: Scratch) -> None:
    """Write the slopes of the loss."""
    last = len(layers.units) - 1
    width, classes = layers.widths[last], layers.units[last]
    first, share = layers.results[last], np.float32(1 / len(batch))
    for r in range(len(batch)):
        at = first + r * width
        slopes = scratch.slopes[at : at + classes]
        scores = scratch.results[at : at + classes]
        write_slopes(goal, batch[r], scores, share, slopes)
        for c in range(classes):
            if scores[c] <= layers.floors[last]:
                slopes[c] = _ZERO


@fast_compiled
def count_others(rows: Array, background: Array, counts: Array) -> None:
    """Write how many numbers of every row differ from the background."""
    for r in range(rows.shape[0]):
        row, count = rows[r], 0
        for i in range(rows.shape[1]):
            count += row[i] != background[i]
        counts[r] = count


@fast_compiled
def list_others(rows: Array, background: Array, places: Array, values: Array) -> None:
    """Write where rows differ from the background, row after row, and by how much.

    What does not differ is written as well, then overwritten: a number too many at the end
    takes less time than to choose each.
    """
    at = np.uint64(0)
    for r in range(rows.shape[0]):
        row = rows[r]
        for i in range(rows.shape[1]):
            places[at] = i
            values[at] = row[i] - background[i]
            at += np.uint64(row[i] != background[i])
