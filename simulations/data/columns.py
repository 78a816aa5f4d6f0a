"""Columns of a CSV file as numbers, and its label column, by public rows alone.

Public rows alone decide: which columns are numbers, dates, categories or of no use, what
stands for a missing value, and the scale. A private cell that does not fit becomes a missing
value or another category, never an error: that a party fails would tell about a record.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray, import_library
from fl_strategies.errors import InvalidData, require_data
from simulations.data.csv import (
    ISO,
    MISSING,
    TRUTH,
    date_format,
    decimal_comma,
    listed,
    mixed_dates,
    number_of,
    numbers,
    parse_dates,
    texts,
)
from simulations.data.files import class_indices, public_scale

logger = logging.getLogger("flwr.fl_strategies")

MAX_CATEGORIES: Final = 256
FEWEST_ROWS: Final = 10
"""Public rows from which on it is no accident that all cells differ, or none does."""
FEW_VALUES: Final = 20
"""A column of more different values, most of them numbers, is not meant as categories."""
FREE_TEXT: Final = 50
_PARTS: Final = MappingProxyType(
    {"year": "year", "month": "month", "weekday": "day_of_week", "hour": "hour"}
)
"""Features of a date, and their names in pandas."""
_ID_NAME = re.compile(
    r"(?i:(?:^|[\W_])(?:id|uuid|guid|index|idx)(?:$|[\W_])|^Unnamed: \d+$)|[a-z](?:Id|ID|UUID)$"
)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A column of numbers; the public median stands for a missing one."""

    name: str
    comma: bool
    fill: float
    indicator: bool
    example: str = ""
    """A public text that was not a plain number."""

    @property
    def width(self) -> int:
        """How many numbers a cell becomes."""
        return 1 + self.indicator

    def encode(self, pandas: ModuleType, column: Any) -> tuple[FloatArray, int]:
        """Return the numbers, and how many cells could not be read."""
        found = numbers(pandas, column, comma=self.comma)
        missing = np.isnan(found)
        parts = [np.where(missing, self.fill, found), *([missing] if self.indicator else [])]
        return np.stack(parts, axis=1).astype(np.float64), _unreadable(pandas, column, missing)

    def __str__(self) -> str:
        notes = ["decimal comma"] if self.comma else []
        if self.example:
            read = number_of(self.example, comma=self.comma)
            notes.append(f"{self.example!r} is {read:.12g}")
        notes += ["missing ones marked"] if self.indicator else []
        return f"{self.name} ({', '.join(notes)})" if notes else self.name


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A column of zeros and ones for each public category, all zeros for any other."""

    name: str
    values: tuple[str, ...]
    num_rare: int = 0

    @property
    def width(self) -> int:
        """How many numbers a cell becomes."""
        return len(self.values)

    def encode(self, pandas: ModuleType, column: Any) -> tuple[FloatArray, int]:
        """Return the zeros and ones; every text is readable."""
        places = {value: place for place, value in enumerate(self.values)}
        found = np.array([places.get(word, -1) for word in _words(pandas, column)], np.int64)
        return (found[:, None] == np.arange(self.width)).astype(np.float64), 0

    def __str__(self) -> str:
        rare = f" of {self.width + self.num_rare}" if self.num_rare else ""
        return f"{self.name} ({self.width}{rare})"


@dataclass(frozen=True, kw_only=True)
class Dates:
    """A column of dates, as numbers; the public median stands for a missing one."""

    name: str
    form: str
    parts: tuple[str, ...]
    fills: tuple[float, ...]
    indicator: bool

    @property
    def width(self) -> int:
        """How many numbers a cell becomes."""
        return len(self.parts) + self.indicator

    def encode(self, pandas: ModuleType, column: Any) -> tuple[FloatArray, int]:
        """Return the parts of the dates, and how many cells could not be read."""
        points = _points(pandas, column, self.form)
        missing = points.isna().to_numpy()
        parts = [
            np.where(missing, fill, _part(points, part))
            for part, fill in zip(self.parts, self.fills, strict=True)
        ]
        marks = [missing] if self.indicator else []
        encoded = np.stack([*parts, *marks], axis=1).astype(np.float64)
        return encoded, _unreadable(pandas, column, missing)

    def __str__(self) -> str:
        written = "" if self.form == ISO else f"{self.form}: "
        marked = ", missing ones marked" if self.indicator else ""
        return f"{self.name} ({written}{', '.join(self.parts)}{marked})"


Column: TypeAlias = Numbers | Categories | Dates
KINDS: Final = ((Numbers, "numbers"), (Dates, "dates"), (Categories, "categories"))


@dataclass(frozen=True, eq=False, kw_only=True)
class TableEncoder:
    """How a table becomes numbers, as its public rows say; see `learn`."""

    columns: tuple[Column, ...]
    dropped: Mapping[str, str]
    """Columns of no use, and why."""
    num_public: int
    scale: Callable[[FloatArray], FloatArray]

    @classmethod
    def learn(cls, owner: str, public: Any, drop: Collection[str] = ()) -> "TableEncoder":
        """Decide what columns mean by public rows, in the order of their file.

        Parameters
        ----------
        owner : str
            File, for errors.
        public : data frame
            Public rows, without a label; its index tells the row of the file.
        drop : collection of str
            Columns to drop.
        """
        pandas = import_library(owner, "pandas", "simulation")
        columns: list[Column] = []
        dropped: dict[str, str] = {}
        for name in public.columns:
            found = "asked for" if name in drop else _decide(owner, pandas, public[name])
            if isinstance(found, str):
                dropped[str(name)] = found
            else:
                columns.append(found)
        told = [f"{name} ({why})" for name, why in dropped.items()] or ["one column"]
        rule = "a label and other columns of use"
        require_data(bool(columns), owner, "the table", rule, listed(told))
        encoded = _encode(owner, pandas, columns, public)
        return cls(
            columns=tuple(columns),
            dropped=dropped,
            num_public=len(public),
            scale=public_scale(encoded),
        )

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return sum(column.width for column in self.columns)

    def encode(self, owner: str, table: Any) -> FloatArray:
        """Return rows as numbers on the public scale; `owner` names their file."""
        pandas = import_library(owner, "pandas", "simulation")
        encoded = _encode(owner, pandas, self.columns, table)
        return self.scale(encoded)

    def describe(self) -> list[str]:
        """Say what was understood, a line for each kind of column; public facts only."""
        total = len(self.columns) + len(self.dropped)
        said = f"as {self.num_public} public rows say"
        lines = [f"{total} columns beside the label become {self.width} numbers, {said}"]
        for kind, title in KINDS:
            named = [str(column) for column in self.columns if isinstance(column, kind)]
            lines += [f"{title} ({len(named)}): {listed(named)}"] if named else []
        if self.dropped:
            named = [f"{name} ({why})" for name, why in self.dropped.items()]
            lines.append(f"dropped ({len(named)}): {listed(named)}")
        return lines


def _encode(
    owner: str, pandas: ModuleType, columns: Collection[Column], table: Any
) -> FloatArray:
    parts = []
    for column in columns:
        encoded, num_unreadable = column.encode(pandas, table[column.name])
        parts.append(encoded)
        if num_unreadable:
            logger.warning(
                "%s: %d values of column %r are not what the public rows have there, and "
                "count as missing.",
                owner,
                num_unreadable,
                column.name,
            )
    return np.concatenate(parts, axis=1)


# What a column is


def _decide(owner: str, pandas: ModuleType, column: Any) -> Column | str:
    """Return the meaning of a column, or why it is of no use."""
    types = pandas.api.types
    if types.is_datetime64_any_dtype(column.dtype):
        return _dates(pandas, column, ISO) if column.notna().any() else _EMPTY
    if types.is_numeric_dtype(column.dtype):
        return _numbers(pandas, column, comma=False)
    words = _words(pandas, column)
    present = sorted({*words.tolist()} - {""})
    if not present:
        return _EMPTY
    comma = decimal_comma(present)
    if comma is not None:
        repaired = [text for text in present if not _is_plain(text)]
        return _numbers(pandas, column, comma=comma, example=max(repaired, key=len, default=""))
    form = date_format(pandas, present)
    if form is not None:
        return _dates(pandas, column, form)
    _refuse_mixture(owner, str(column.name), present)
    found = _categories(str(column.name), words)
    is_text = found in (_FREE_TEXT, _ALL_DIFFERENT)
    return _MIXED_DATES if is_text and mixed_dates(pandas, present) else found


_EMPTY: Final = "empty"
_CONSTANT: Final = "always the same"
_ID: Final = "an id"
_FREE_TEXT: Final = "free text"
_ALL_DIFFERENT: Final = "different in every row"
_MIXED_DATES: Final = "dates written in several ways"


def _numbers(
    pandas: ModuleType, column: Any, *, comma: bool, example: str = ""
) -> Numbers | str:
    found = numbers(pandas, column, comma=comma)
    present = found[~np.isnan(found)]
    if not len(present):
        return _EMPTY
    distinct, enough = len(np.unique(present)), len(found) >= FEWEST_ROWS
    complete = len(present) == len(found)
    if distinct == 1 and complete and enough:
        return _CONSTANT
    whole = bool((present % 1 == 0).all())
    if whole and _is_id(str(column.name), distinct, len(present)):
        return _ID
    if whole and complete and enough and _counts_rows(found, column.index):
        return "numbers the rows"
    return Numbers(
        name=str(column.name),
        comma=comma,
        fill=float(np.median(present)),
        indicator=not complete,
        example=example,
    )


def _categories(name: str, words: Array) -> Categories | str:
    values, counts = np.unique(words, return_counts=True)
    present = int((words != "").sum())
    distinct, enough = len(values) - ("" in values), len(words) >= FEWEST_ROWS
    if len(values) == 1 and enough:
        return _CONSTANT
    if _is_id(name, distinct, present):
        return _ID
    if distinct == present >= FEWEST_ROWS:
        return _ALL_DIFFERENT
    if distinct > max(FREE_TEXT, present / 2):
        return _FREE_TEXT
    kept = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
    rare = len(values) - len(kept)
    return Categories(name=name, values=tuple(values[kept].tolist()), num_rare=rare)


def _dates(pandas: ModuleType, column: Any, form: str) -> Dates | str:
    points = _points(pandas, column, form)
    present = points.dropna()
    parts = [part for part in _PARTS if _part(present, part).std() > 0]
    if not parts:
        return _CONSTANT
    return Dates(
        name=str(column.name),
        form=form,
        parts=tuple(parts),
        fills=tuple(float(np.median(_part(present, part))) for part in parts),
        indicator=bool(points.isna().any()),
    )


def _is_id(name: str, num_distinct: int, num_present: int) -> bool:
    named = _ID_NAME.search(name) is not None
    return named and num_distinct > 1 and num_distinct > num_present / 2


def _counts_rows(found: FloatArray, index: Any) -> bool:
    """Return whether a column is the number of the row in the file, from wherever."""
    steps = found - index.to_numpy()
    return bool((steps == steps[0]).all())


def _refuse_mixture(owner: str, name: str, present: list[str]) -> None:
    """Raise for a column of numbers with texts in between, and quote one of public rows."""
    others = [text for text in present if decimal_comma([text]) is None]
    if len(present) > FEW_VALUES and len(others) < len(present) / 2:
        raise InvalidData(
            f"{owner}: column {name!r} must be numbers, as most of its public values are, or "
            f"text, got {others[0][:40]!r}. Repair such values, or drop the column "
            f"(--drop {name}, setting drop)."
        )


# Cells


def _words(pandas: ModuleType, column: Any) -> Array:
    """Return texts of which truth values have one spelling, however programs write them."""
    found: Array = texts(pandas, column)
    if pandas.api.types.is_bool_dtype(column.dtype):
        return found
    return np.array(
        [text.capitalize() if text.lower() in TRUTH else text for text in found], dtype=object
    )


def _is_plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in TRUTH
    return True


def _points(pandas: ModuleType, column: Any, form: str) -> Any:
    if pandas.api.types.is_datetime64_any_dtype(column.dtype):
        found = pandas.to_datetime(column, utc=True).dt.tz_localize(None)
        return found.reset_index(drop=True)
    return parse_dates(pandas, texts(pandas, column).tolist(), form)


def _part(points: Any, part: str) -> FloatArray:
    values = getattr(points.dt, _PARTS[part]).to_numpy(dtype=np.float64, na_value=np.nan)
    return np.asarray(values)


def _unreadable(pandas: ModuleType, column: Any, missing: Array) -> int:
    """Return how many cells are missing although something is there."""
    if not missing.any():
        return 0
    return int((texts(pandas, column[missing]) != "").sum())


UNLABELLED: Final = -1
"""Stands for a class where a row has no label."""
MOST_NUMBERS: Final = 100
"""Different numbers that can still be classes."""
FEW_TEXTS: Final = 20


def label_classes(owner: str, label: str, column: Any) -> tuple[tuple[str, ...], IntArray]:
    """Return sorted class names and class indices; question what looks like no classes.

    A row without a label has `UNLABELLED` instead of an index. Empty labels are missing and,
    among numbers, words such as NA; among texts, NA may be a class.
    """
    every = label_texts(column)
    labelled = ~_missing(every)
    words = every[labelled]
    rule = f"a column of classes, got {label!r} without a single value"
    if not len(words):
        raise InvalidData(f"{owner}: label must be {rule}.")
    numbers = _numeric_labels(words)
    if numbers is not None:
        _require_classes(owner, label, numbers)
    else:
        distinct, few = len(np.unique(words)), max(FEW_TEXTS, len(words) / 2)
        rule = "a column of classes, each in several rows"
        found = f"{label!r} with {distinct} different texts in {len(words)} rows"
        require_data(distinct <= few, owner, "label", rule, found)
    found_labels = words.astype(np.str_) if numbers is None else numbers
    classes, (found_classes,) = class_indices(owner, (f"column {label!r}", found_labels))
    y = np.full(len(every), UNLABELLED, dtype=np.int64)
    y[labelled] = found_classes
    return classes, y


def label_texts(column: Any) -> Array:
    """Return labels as texts without spaces around them; empty where there is none."""
    plain = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    return np.array(plain.tolist(), dtype=object)


def _missing(words: Array) -> Array:
    absent = np.array([word in MISSING for word in words], dtype=bool)
    among_numbers = _numeric_labels(words[~absent]) is not None
    return absent if among_numbers else np.asarray(words == "")


def _numeric_labels(words: Array) -> Array | None:
    try:
        return words.astype(np.float64)
    except ValueError:
        return None


def _require_classes(owner: str, label: str, numbers: Array) -> None:
    distinct = len(np.unique(numbers))
    whole = bool((np.isfinite(numbers) & (numbers == np.round(numbers))).all())
    if whole and distinct <= MOST_NUMBERS:
        return
    kind = "" if whole else ", not all of them whole"
    raise InvalidData(
        f"{owner}: label must be a column of classes, got {label!r} with {distinct} different "
        f"numbers{kind}. Regression on tables is not supported. Make classes of it first, "
        f"such as quarters: table[{label!r}] = pandas.qcut(table[{label!r}], 4, "
        "labels=['lowest', 'low', 'high', 'highest'])."
    )
