"""Statistics of a table whose rows are dealt to parties: the run, the page, its pictures.

Columns are those of a schema, which declares them, or what public rows make of them; these are
then in no figure. Every number has a column that marks its gaps.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Context

from clients import MomentsLearner, client_app
from fl_strategies import Column, Party, Statistics
from fl_strategies._util import FloatArray, IntArray
from fl_strategies.errors import require
from fl_strategies.registry import DESCRIBING
from simulations.config import Settings
from simulations.data.schema import DateColumn, Measured, Schema
from simulations.data.splits import PAPER_TRAIN_SHARE, Deal, partition, split_rows
from simulations.data.tables import (
    TABLES,
    UNLABELLED,
    Measures,
    TableEncoder,
    dropped,
    label_classes,
    read_table,
    require_label,
)
from simulations.experiments.plots import COLOURS, DOTS_PER_INCH, GREY, GRID, new_figure
from simulations.runtime.local import run_local

OWNER: Final = "describe"
MISSING: Final = "missing"
_YEAR: Final = 365.2425
_FIRST_YEAR: Final = 1970
_CALENDAR: Final = {"month": (1.0, 12.0), "weekday": (0.0, 6.0), "hour": (0.0, 23.0)}
_COLOURS: Final = (*COLOURS[::2], *COLOURS[1::2])
"""Those next to each other are least alike."""
MOST_PICTURED: Final = 48
"""Histograms, and columns of a matrix of correlations, that a page has."""
_NAMED: Final = 24


@dataclass(frozen=True, eq=False)
class Records:
    """Rows of a table as numbers in their own units, with what they mean."""

    x: FloatArray
    y: IntArray
    columns: tuple[Column, ...]
    classes: tuple[str, ...]
    """Names of the groups; none if the table is described as a whole."""
    public: int
    """Rows that decided what columns mean, and are in no figure."""


@dataclass(frozen=True, eq=False)
class Description:
    """Statistics of a table, and what was promised."""

    statistics: Statistics
    records: Records
    num_parties: int
    statement: str


def read_records(settings: Settings) -> Records:
    """Read a table; a row without a label of the schema or the table is left out."""
    path = Path(settings.data)
    rule = f"a table ({', '.join(TABLES)})"
    require(settings.data.endswith(TABLES) and path.is_file(), OWNER, "data", rule, str(path))
    table, schema = read_table(path), None
    names = [str(name) for name in table.columns]
    label, y = settings.label, np.zeros(len(table), dtype=np.int64)
    classes: tuple[str, ...] = ()
    if settings.schema:
        schema = Schema.load(settings.schema)
        label = schema.label_name(label) if schema.label.classes else ""
    if label:
        require_label(path.name, label, names)
        column = table.pop(label)
        if schema is None:
            classes, y = label_classes(path.name, label, column)
        else:
            classes, y = schema.label.classes, schema.class_indices(column, path.name)
    known = y != UNLABELLED
    table, y = table[known].reset_index(drop=True), y[known]
    if schema is not None:
        x, columns = _declared(schema, table)
        return Records(x, y, columns, classes, 0)
    unused = dropped(path.name, settings.drop, names, label)
    rng = np.random.RandomState(settings.seed)
    train, public, test = split_rows(len(y), PAPER_TRAIN_SHARE, rng)
    encoder = TableEncoder.learn(path.name, table.iloc[public], unused)
    own = np.sort(np.concatenate([train, test]))
    x, columns = _learned(encoder, table, public)
    return Records(x[own], y[own], columns, classes, len(public))


def _declared(schema: Schema, table: Any) -> tuple[FloatArray, tuple[Column, ...]]:
    """Return rows, and columns by the bounds of a schema; dates are years."""
    parts: list[FloatArray] = []
    columns: list[Column] = []
    for one in schema.columns:
        absent = one.name not in table.columns
        if not isinstance(one, Measured):
            encoded = one.encode(table[one.name])[0] if not absent else None
            parts.append(np.zeros((len(table), one.width)) if encoded is None else encoded)
            columns += _categories(one.name, one.values)
            continue
        found = np.full(len(table), np.nan) if absent else one.read(table[one.name])
        bounds = np.array([[one.least], [one.most]])
        if isinstance(one, DateColumn):
            found, bounds = (_FIRST_YEAR + days / _YEAR for days in (found, bounds))
        parts.append(_marked(found[:, None]))
        columns += _measures(one.name, [""], bounds)
    return np.concatenate(parts, axis=1), tuple(columns)


def _learned(
    encoder: TableEncoder, table: Any, public: IntArray
) -> tuple[FloatArray, tuple[Column, ...]]:
    """Return rows, and columns whose bounds are those of public rows, rounded outwards."""
    parts: list[FloatArray] = []
    columns: list[Column] = []
    for one in encoder.columns:
        if not isinstance(one, Measures):
            parts.append(one.encode(table[one.name])[0])
            columns += _categories(one.name, one.values)
            continue
        found = one.read(table[one.name])
        shown = found[public][~np.isnan(found[public, 0])]
        words = getattr(one, "parts", [""])
        bounds = [
            _CALENDAR.get(word) or _roomy(float(part.min()), float(part.max()))
            for word, part in zip(words, shown.T, strict=True)
        ]
        parts.append(_marked(found))
        columns += _measures(one.name, words, np.array(bounds).T)
    return np.concatenate(parts, axis=1), tuple(columns)


def _marked(found: FloatArray) -> FloatArray:
    gaps = np.isnan(found[:, :1])
    return np.hstack([np.where(gaps, 0.0, found), gaps])


def _measures(name: str, parts: Sequence[str], bounds: FloatArray) -> list[Column]:
    own = [
        Column(name=f"{name}: {part}" if part else name, low=low, high=high, of=name)
        for part, (low, high) in zip(parts, bounds.T.tolist(), strict=True)
    ]
    return [*own, Column(name=f"{name}: {MISSING}", kind="gap", of=name)]


def _categories(name: str, values: Sequence[str]) -> list[Column]:
    return [
        Column(name=f"{name}: {value or MISSING}", kind="category", of=name) for value in values
    ]


def _roomy(low: float, high: float) -> tuple[float, float]:
    """Return round bounds with room around public values, which are only some of all.

    Zero is not crossed, and zeros and ones stay what they are.

    Examples
    --------
    >>> _roomy(17.0, 88.0), _roomy(0.0, 1.0), _roomy(3.0, 3.0)
    ((0.0, 125.0), (0.0, 1.0), (1.5, 4.5))
    """
    if (low, high) == (0, 1):
        return low, high
    room = (high - low) / 2 or max(abs(low) / 2, 1.0)
    start = max(low - room, 0.0) if low >= 0 else low - room
    end = min(high + room, 0.0) if high <= 0 < -low else high + room
    step = 10.0 ** math.floor(math.log10(end - start)) / 4
    return math.floor(start / step) * step, math.ceil(end / step) * step


def describe_table(settings: Settings) -> Description:
    """Deal a table to parties, and run the round that describes it."""
    records = read_records(settings)
    several = len(records.classes) > 1
    rng = np.random.RandomState(settings.seed)
    deal = Deal(
        y=records.y,
        num_parties=settings.num_parties,
        scheme=settings.partition if several else "iid",
        num_classes=max(2, len(records.classes)),
        rng=rng,
        min_records=settings.min_records,
        beta=settings.beta,
        balanced=settings.balanced,
        mixing=settings.mixing,
        shares=settings.party_shares,
    )
    rows = partition(deal)
    num_classes = max(2, len(records.classes))

    def learner() -> MomentsLearner:
        return MomentsLearner(num_classes=num_classes)

    def load_party(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        own = rows[number]
        return Party(
            x=records.x[own],
            y=records.y[own],
            num_classes=num_classes,
            learner_fn=learner,
            partition_id=number,
        )

    options: Any = settings.options
    expected = options.num_records or len(records.y)
    strategy = DESCRIBING(
        columns=records.columns,
        groups=records.classes if several else None,
        num_classes=num_classes,
        learner_fn=learner,
        num_parties=settings.num_parties,
        min_parties=settings.min_parties or min(2, settings.num_parties),
        seed=settings.seed,
        options=replace(options, num_records=expected, by_class=several and options.by_class),
    )
    run_local(strategy, client_app(load_party), settings.num_parties)
    statement = strategy.ledger_.statement()
    return Description(strategy.statistics_, records, settings.num_parties, statement)


# Pictures


def pictures(found: Statistics) -> dict[str, str]:
    """Return titles and pictures, as addresses that a page can have inside."""
    drawn = {"Histograms": _histograms(found)} if found.numbers else {}
    if found.survival is not None:
        drawn["Share without an event (Kaplan-Meier)"] = _survival(found)
    if found.correlations is not None and len(found.columns) > 1:
        drawn["Correlations"] = _correlations(found)
    return {title: _inside(figure) for title, figure in drawn.items()}


def _inside(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _groups(found: Statistics) -> list[int]:
    """Return the groups that are drawn: all classes, or everybody where there are none."""
    return [*range(1, min(len(found.groups), 1 + len(_COLOURS)))] or [0]


def _histograms(found: Statistics) -> Any:
    """Draw the share of each group in each bin of the first numbers."""
    number = min(len(found.numbers), MOST_PICTURED)
    across = min(4, number)
    down = math.ceil(number / across)
    figure = new_figure(OWNER, (2.6 * across, 2.0 * down + 0.5))
    panels = [*figure.subplots(down, across, squeeze=False).flat]
    for place, axes in enumerate(panels):
        axes.set_visible(place < number)
        if place >= number:
            continue
        for group in _groups(found):
            counts = found.histograms[group, place]
            shares = 100 * counts / max(float(counts.sum()), 1e-300)
            look = {"color": _COLOURS[max(group - 1, 0)], "label": found.groups[group]}
            axes.stairs(shares, found.edges[place], **look)
        axes.set_title(found.numbers[place], fontsize="small", parse_math=False)
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=GRID)
    _name_groups(figure, panels[0], found)
    return figure


def _survival(found: Statistics) -> Any:
    """Draw the curves of survival of each group."""
    figure = new_figure(OWNER, (7.5, 4.5))
    axes = figure.subplots()
    assert found.survival is not None and found.times is not None  # noqa: S101, PT018
    for group in _groups(found):
        look = {"color": _COLOURS[max(group - 1, 0)], "label": found.groups[group]}
        axes.step(found.times, 100 * found.survival[group], where="post", **look)
    axes.set_ylim(0, 101)
    axes.set_ylabel("%")
    axes.grid(alpha=GRID)
    _name_groups(figure, axes, found)
    return figure


def _name_groups(figure: Any, axes: Any, found: Statistics) -> None:
    if len(found.groups) > 1:
        handles, labels = axes.get_legend_handles_labels()
        options = {"ncols": 5, "fontsize": "small", "frameon": False}
        named = figure.legend(handles, labels, loc="outside lower center", **options)
        for text in named.get_texts():
            text.set_parse_math(False)


def _correlations(found: Statistics) -> Any:
    """Draw the correlations of the first columns, in all groups together."""
    assert found.correlations is not None  # noqa: S101
    number = min(len(found.columns), MOST_PICTURED)
    shown = np.ma.masked_invalid(found.correlations[0, :number, :number])
    size = 3.5 + 0.16 * number
    figure = new_figure(OWNER, (size + 1.2, size))
    axes = figure.subplots()
    image = axes.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set_facecolor(GREY)
    names = [_short(name) for name in found.columns[:number]]
    axes.set_xticks(range(number), names, rotation=90, fontsize="x-small", parse_math=False)
    axes.set_yticks(range(number), names, fontsize="x-small", parse_math=False)
    figure.colorbar(image, shrink=0.7)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= _NAMED else f"{name[: _NAMED - 1]}\N{HORIZONTAL ELLIPSIS}"
