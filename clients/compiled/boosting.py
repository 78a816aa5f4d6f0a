"""Boosted trees on binned columns, compiled for the processor they run on.

The sums of gradients and curvatures are whole numbers, both in one word of 64 bits. One
addition serves both and is exact, so that the histogram of a node less that of one child is
that of the other to the bit.

Nodes wait on a stack, and the smaller child goes first: at most as many histograms are held as
the rows can be halved, however deep a tree is.
"""

import math
from typing import Final, NamedTuple

import numpy as np

from clients.compiled import compiled, part
from fl_strategies._util import Array, FloatArray, IntArray


class Bins(NamedTuple):
    """Rows of a training set whose columns are cut into bins, all of them numbered through.

    Constant columns are dropped, but the first is not: there is a bin in any case.
    """

    codes: Array
    """Bin of every row in each column that is left, (n, u) of uint32."""
    starts: IntArray
    """First bin of each of these columns, and the number of all bins, (u + 1,)."""
    cuts: FloatArray
    """Largest number that every bin takes, (starts[-1],) of float32."""
    columns: IntArray
    """Numbers of the columns that are left, (u,)."""


def bin_rows(x: Array, max_bin: int) -> Bins:
    """Return the bins of rows (n, d) of float32, at most `max_bin` a column.

    Every value has a bin of its own where there are few enough; else bins are of about as many
    rows each. Cuts lie midway between the values of neighbouring bins.

    Examples
    --------
    >>> bins = bin_rows(np.array([[0, 7], [1, 7], [3, 7]], dtype=np.float32), 64)
    >>> bins.codes.ravel(), bins.cuts
    (array([0, 1, 2], dtype=uint32), array([0.5, 2. , inf], dtype=float32))
    """
    num_rows, width = x.shape
    ordered = np.sort(np.ascontiguousarray(x.T), axis=1)
    cuts = np.empty(width * min(max_bin, num_rows), dtype=np.float32)
    starts = np.zeros(width + 1, dtype=np.int64)
    columns = np.zeros(width, dtype=np.int64)
    kept = cut_columns(ordered, max_bin, cuts, starts, columns)
    starts, columns = starts[: kept + 1], columns[:kept]
    cuts = cuts[: starts[-1]].copy()
    codes = np.empty((num_rows, kept), dtype=np.uint32)
    # Another kind of array, such as a read-only one, would be compiled for anew.
    encode(np.require(x, requirements=("C", "W")), starts, cuts, columns, codes)
    return Bins(codes, starts, cuts, columns)


@compiled
def cut_columns(
    ordered: Array, max_bin: int, cuts: Array, starts: Array, columns: Array
) -> int:
    """Write the cuts of sorted columns (d, n), and return how many columns have any."""
    kept = used = 0
    for column in range(ordered.shape[0]):
        num_cuts = cut_column(ordered[column], max_bin, cuts[used:])
        if num_cuts or column == 0:
            cuts[used + num_cuts] = np.inf
            used += num_cuts + 1
            columns[kept] = column
            kept += 1
            starts[kept] = used
    return kept


@part
def cut_column(values: Array, max_bin: int, cuts: Array) -> int:
    """Write the cuts between sorted values (n,), and return how many there are."""
    num_rows, num_distinct = len(values), 1
    for i in range(1, num_rows):
        num_distinct += values[i] > values[i - 1]
    num_cuts = below = 0
    for i in range(1, num_rows):
        # A bin is full when it has its share of the rows that the bins before have left.
        full = (i - below) * (max_bin - num_cuts) >= num_rows - below
        if values[i] > values[i - 1] and (full or num_distinct <= max_bin):
            middle = values[i - 1] / np.float32(2) + values[i] / np.float32(2)
            # Between neighbouring numbers there is none: the smaller one is the cut.
            cuts[num_cuts] = middle if middle < values[i] else values[i - 1]
            num_cuts += 1
            below = i
            if num_cuts == max_bin - 1:
                break
    return num_cuts


@compiled
def encode(x: Array, starts: Array, cuts: Array, columns: Array, codes: Array) -> None:
    """Write the bin of every row: the first whose cut is not below the value."""
    for i in range(x.shape[0]):
        for j in range(len(columns)):
            value = x[i, columns[j]]
            code, left = starts[j], starts[j + 1] - starts[j] - 1
            while left:
                half = (left + 1) >> 1
                code += half if value > cuts[code + half - 1] else 0
                left -= half
            codes[i, j] = code


LEAST_CURVATURE: Final = 1.0
"""Least weight of a child: XGBoost's `min_child_weight`."""
LEAST_GAIN: Final = 1e-6
_LOW_HALF: Final = 0xFFFFFFFF


class Rule(NamedTuple):
    """Rules of growth."""

    max_depth: int
    learning_rate: float
    gamma: float
    reg_lambda: float


class Units(NamedTuple):
    """Units of the upper and the lower half of a word."""

    slope: float
    curvature: float


class Work(NamedTuple):
    """Numbers of rows, (n,), and of bins, (b,), while a tree grows."""

    packed: IntArray
    """Gradient and curvature of every row, in one word."""
    rows: Array
    """Rows by their nodes."""
    spare: Array
    below: IntArray
    """Sums of all bins of a column up to each."""
    gains: FloatArray
    gain_bits: IntArray
    """The same memory as whole numbers, which are in the same order and faster to compare."""


class Stack(NamedTuple):
    """Nodes that wait for their split."""

    node: IntArray
    start: IntArray
    stop: IntArray
    level: IntArray
    total: IntArray
    sums: IntArray
    """Histogram of every node, (s, b)."""


class Draft(NamedTuple):
    """A tree while it grows: the children of a node are neighbours, a leaf's are 0."""

    left: IntArray
    column: IntArray
    cut: IntArray
    value: FloatArray
    order: IntArray


class Growth(NamedTuple):
    """The trees so far, in the form of `clients.tabular.trees.Trees`, with room for more."""

    sizes: IntArray
    leaf: Array
    features: IntArray
    thresholds: FloatArray
    values: FloatArray


@compiled
def boost(
    bins: Bins,
    rule: Rule,
    targets: Array,
    scores: Array,
    chances: Array,
    work: Work,
    stack: Stack,
    draft: Draft,
    growth: Growth,
    used: Array,
) -> None:
    """Add trees, round by round, while there is room for another round.

    Parameters
    ----------
    targets, scores, chances : (k, n) of float32
        Shares of the second of two classes, k = 1, or of each of several, and what the trees
        say of them.
    used : (3,)
        Trees, nodes and splits in `growth`.
    """
    num_scores = len(scores)
    factor = 1.0 if num_scores == 1 else 2.0  # XGBoost's curvature for several classes
    most = num_scores * len(draft.left)
    while used[0] < len(growth.sizes) and used[1] + most <= len(growth.leaf):
        _fill_chances(scores, chances)
        for c in range(num_scores):
            units = _pack(chances[c], targets[c], factor, work.packed)
            size = _grow(bins, rule, units, work, stack, draft, scores[c])
            _keep(draft, size, bins, growth, used)


@part
def _fill_chances(scores: Array, chances: Array) -> None:
    """Write the probabilities of the second of two classes, or of each of several."""
    num_scores, num_rows = scores.shape
    one = np.float32(1)
    for i in range(num_rows):
        if num_scores == 1:
            chances[0, i] = one / (one + math.exp(-scores[0, i]))
            continue
        most = scores[0, i]
        for c in range(1, num_scores):
            most = max(most, scores[c, i])
        total = np.float32(0)
        for c in range(num_scores):
            chances[c, i] = math.exp(scores[c, i] - most)
            total += chances[c, i]
        for c in range(num_scores):
            chances[c, i] /= total


@part
def _pack(chances: Array, targets: Array, factor: float, packed: Array) -> Units:
    """Write the gradient and the curvature of every row's loss into one word."""
    num_rows, one = len(packed), np.float32(1)
    slopes = curvatures = 0.0
    for i in range(num_rows):
        slopes += abs(chances[i] - targets[i])
        curvatures += factor * (chances[i] * (one - chances[i]))
    units = Units(_unit(slopes, num_rows, 31), _unit(curvatures, num_rows, 32))
    per_slope, per_curvature = 1 / units.slope, factor / units.curvature
    for i in range(num_rows):
        slope = math.floor(per_slope * (chances[i] - targets[i]) + 0.5)
        curvature = math.floor(per_curvature * (chances[i] * (one - chances[i])) + 0.5)
        packed[i] = (np.int64(slope) << 32) + np.int64(curvature)
    return units


@part
def _unit(total: float, num_rows: int, bits: int) -> float:
    """Return the power of 2 in which the sum of rounded numbers needs no more than the bits."""
    room = 2.0**bits - 1 - num_rows
    return 2.0 ** math.ceil(math.log2(max(total, 1e-30) / room))


@part
def _grow(
    bins: Bins, rule: Rule, units: Units, work: Work, stack: Stack, draft: Draft, scores: Array
) -> int:
    """Draft a tree, add what it says to the scores of its rows, and return its size."""
    total = 0
    for i in range(len(work.rows)):
        work.rows[i] = i
        total += work.packed[i]
    _push(stack, 0, 0, 0, len(work.rows), 0, total)
    _add_up(bins.codes, work.rows, work.packed, stack.sums[0])
    _draft_leaf(draft, 0, total, units, rule)
    size, waiting = 1, 1
    while waiting:
        at = waiting - 1
        column, cut, gain = _best_split(
            stack.sums[at], bins.starts, stack.total[at], units, rule.reg_lambda, work
        )
        if gain > LEAST_GAIN and gain >= rule.gamma:
            node = stack.node[at]
            draft.left[node], draft.column[node], draft.cut[node] = size, column, cut
            waiting = _split(bins, rule, units, work, stack, at, draft, scores)
            size += 2
        else:
            own = work.rows[stack.start[at] : stack.stop[at]]
            _add_value(scores, own, draft.value[stack.node[at]])
            waiting = at
    return size


@part
def _push(
    stack: Stack, at: int, node: int, start: int, stop: int, level: int, total: int
) -> None:
    stack.node[at] = node
    stack.start[at] = start
    stack.stop[at] = stop
    stack.level[at] = level
    stack.total[at] = total


@part
def _add_up(codes: Array, rows: Array, packed: Array, sums: Array) -> None:
    """Write the sums of the rows in every bin."""
    for k in range(len(sums)):
        sums[k] = 0
    for i in range(len(rows)):
        row = rows[i]
        for j in range(codes.shape[1]):
            sums[codes[row, j]] += packed[row]


@part
def _best_split(
    sums: Array, starts: Array, total: int, units: Units, reg_lambda: float, work: Work
) -> tuple[int, int, float]:
    """Return column, bin and gain of the best split, the first of equals."""
    below, gains = work.below, work.gains
    for j in range(len(starts) - 1):
        running = np.int64(0)
        for k in range(starts[j], starts[j + 1]):
            running += sums[k]
            below[k] = running
    slope = (total >> 32) * units.slope
    curvature = (total & _LOW_HALF) * units.curvature
    for k in range(len(sums)):
        g = (below[k] >> 32) * units.slope
        h = (below[k] & _LOW_HALF) * units.curvature
        others_g, others_h = slope - g, curvature - h
        a, b = h + reg_lambda, others_h + reg_lambda
        gain = (g * g * b + others_g * others_g * a) / (a * b)
        fits = (h >= LEAST_CURVATURE) & (others_h >= LEAST_CURVATURE)
        gains[k] = gain if fits else 0.0
    column, cut = _largest(work.gain_bits, starts)
    return column, cut, gains[cut] - slope * slope / (curvature + reg_lambda)


@part
def _largest(gain_bits: Array, starts: Array) -> tuple[int, int]:
    """Return column and bin of the largest gain, the first of equals."""
    best = np.int64(0)
    for k in range(len(gain_bits)):
        best = max(best, gain_bits[k])
    cut = 0
    while gain_bits[cut] < best:
        cut += 1
    column = 0
    while starts[column + 1] <= cut:
        column += 1
    return column, cut


@part
def _split(
    bins: Bins,
    rule: Rule,
    units: Units,
    work: Work,
    stack: Stack,
    at: int,
    draft: Draft,
    scores: Array,
) -> int:
    """Give a node's rows to its children, and return how many nodes wait then."""
    node, start, stop, level = stack.node[at], stack.start[at], stack.stop[at], stack.level[at]
    left, column, cut = draft.left[node], draft.column[node], draft.cut[node]
    own = work.rows[start:stop]
    totals = (work.below[cut], stack.total[at] - work.below[cut])
    for side in range(2):
        _draft_leaf(draft, left + side, totals[side], units, rule)
    are_open = (
        _may_split(totals[0], units, level + 1, rule),
        _may_split(totals[1], units, level + 1, rule),
    )
    middle = start + _divide(bins.codes, column, cut, own, work.spare)
    ends = (start, middle, stop)
    for side in range(2):
        if not are_open[side]:
            own = work.rows[ends[side] : ends[side + 1]]
            _add_value(scores, own, draft.value[left + side])
    if not (are_open[0] or are_open[1]):
        return at
    return _push_children(bins.codes, work, stack, at, left, ends, totals, are_open)


@part
def _push_children(
    codes: Array,
    work: Work,
    stack: Stack,
    at: int,
    left: int,
    ends: tuple[int, int, int],
    totals: tuple[int, int],
    are_open: tuple[bool, bool],
) -> int:
    """Let the children that may split wait in their parent's place, the smaller one on top."""
    small = 0 if ends[1] - ends[0] <= ends[2] - ends[1] else 1
    large, level = 1 - small, stack.level[at] + 1
    top = at + 1 if are_open[large] else at
    _add_up(codes, work.rows[ends[small] : ends[small + 1]], work.packed, stack.sums[top])
    if are_open[large]:
        for k in range(stack.sums.shape[1]):
            stack.sums[at, k] -= stack.sums[top, k]
        _push(stack, at, left + large, ends[large], ends[large + 1], level, totals[large])
    if are_open[small]:
        _push(stack, top, left + small, ends[small], ends[small + 1], level, totals[small])
        top += 1
    return top


@part
def _divide(codes: Array, column: int, cut: int, rows: Array, spare: Array) -> int:
    """Move the rows above a bin behind the others, both in their order; count the others."""
    left = right = 0
    for i in range(len(rows)):
        row = rows[i]
        above = codes[row, column] > cut
        rows[left] = row
        spare[right] = row
        left += not above
        right += above
    for i in range(right):
        rows[left + i] = spare[i]
    return left


@part
def _draft_leaf(draft: Draft, node: int, total: int, units: Units, rule: Rule) -> None:
    slope, curvature = (total >> 32) * units.slope, (total & _LOW_HALF) * units.curvature
    value = -rule.learning_rate * slope / (curvature + rule.reg_lambda)
    draft.left[node] = 0
    draft.value[node] = value if curvature >= LEAST_CURVATURE else 0.0


@part
def _may_split(total: int, units: Units, level: int, rule: Rule) -> bool:
    enough = (total & _LOW_HALF) * units.curvature >= 2 * LEAST_CURVATURE
    return enough and level < rule.max_depth


@part
def _add_value(scores: Array, rows: Array, value: np.float32) -> None:
    for i in range(len(rows)):
        scores[rows[i]] += value


@part
def _keep(draft: Draft, size: int, bins: Bins, growth: Growth, used: Array) -> None:
    """Write a tree behind the others, level after level."""
    growth.sizes[used[0]] = size
    nodes, splits, reached = used[1], used[2], 1
    draft.order[0] = 0
    for i in range(size):
        node = draft.order[i]
        left = draft.left[node]
        growth.leaf[nodes] = left == 0
        if left:
            draft.order[reached], draft.order[reached + 1] = left, left + 1
            reached += 2
            growth.features[splits] = bins.columns[draft.column[node]]
            growth.thresholds[splits] = bins.cuts[draft.cut[node]]
            splits += 1
        else:
            growth.values[nodes - splits] = draft.value[node]
        nodes += 1
    used[0], used[1], used[2] = used[0] + 1, nodes, splits
