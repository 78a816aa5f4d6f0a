"""Schemas: what the columns of a table may hold, declared by people and not taken from rows.

With a schema no public rows are needed to read a table. A number becomes its place between
its bounds, a date likewise, and a category one of several indicators; a gap is a row of zeros.
Cells are read one by one, as everywhere (`simulations.data.tables`): one that does not fit is
a gap, or cut to its bounds, and never an error.
"""

import datetime
import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from fl_strategies._util import (
    SHARED,
    Array,
    FloatArray,
    IntArray,
    nearest,
    nearest_name,
    replace_file,
)
from fl_strategies.errors import InvalidData, require, require_data
from simulations.data.tables import (
    ISO,
    MISSING,
    UNLABELLED,
    category_words,
    date_points,
    label_texts,
    listed,
    numbers,
    texts,
)
from simulations.data.targets import Targets

logger = logging.getLogger("flwr.fl_strategies")

ABOUT: Final = (
    "Bounds and values here come from what is publicly known, such as documentation, law or "
    "the range of an instrument. They must not come from private records: a bound that was "
    "the largest value of some records tells about whom it belongs to."
)
"""The first note of every written schema."""
LARGEST_FILE: Final = 2**24
MOST_DEFECTS: Final = 20
_DAY: Final = 86400.0
_SPREAD: Final = 1 / 3
"""Usual distance of a number from its usual value, in units of the farther bound's."""


# Columns


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A column whose cells lie between two bounds.

    Parameters
    ----------
    name : str
    least, most : float
        Values beyond are cut to them.
    log : bool (default: False)
        Whether the logarithm counts, of the magnitude plus 1, for values of many sizes.
    usual : float, optional
        The value that becomes 0, and that a gap is taken for: without one, 0 where that is
        between the bounds, and otherwise the middle.
    cuts : sequence of float
        Numbers between the bounds, ascending. With some the column becomes one indicator for
        each interval between them, so that the effect need not be linear.
    """

    name: str
    least: float
    most: float
    log: bool = False
    usual: float | None = None
    cuts: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Numbers per cell."""
        return len(self.cuts) + 1 if self.cuts else 1

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Least and largest value of each number."""
        if self.cuts:
            return np.zeros(self.width), np.ones(self.width)
        ends = self._placed(np.array([self.least, self.most]))
        return ends[:1], ends[1:]

    def read(self, column: Any) -> FloatArray:
        """Return the value of each cell; NaN for a gap."""
        raise NotImplementedError

    def encode(self, column: Any) -> tuple[FloatArray, Array]:
        """Return what cells become, (num_rows, width), and which of them are gaps."""
        found = self.read(column)
        missing = np.isnan(found)
        inside = np.clip(found, self.least, self.most)
        if self.cuts:
            interval = np.searchsorted(np.array(self.cuts), inside, side="right")
            is_one = (interval[:, None] == np.arange(self.width)) & ~missing[:, None]
            return is_one.astype(np.float64), missing
        return np.where(missing, 0.0, self._placed(inside))[:, None], missing

    def _placed(self, values: FloatArray) -> FloatArray:
        """Return values less the usual one, in units of the farther bound's distance."""
        least, most = self._scaled(np.array([self.least, self.most]))
        if self.usual is not None:
            zero = float(self._scaled(np.array([self.usual]))[0])
        else:
            zero = 0.0 if least <= 0 <= most else (least + most) / 2
        return np.asarray((self._scaled(values) - zero) / max(most - zero, zero - least))

    def _scaled(self, values: FloatArray) -> FloatArray:
        return np.sign(values) * np.log1p(np.abs(values)) if self.log else values


@dataclass(frozen=True, kw_only=True)
class NumberColumn(Measured):
    """A column of numbers; `comma` says that a comma comes before decimals."""

    kind: ClassVar[str] = "number"

    comma: bool = False

    def read(self, column: Any) -> FloatArray:
        """Return the number of each cell."""
        return numbers(column, comma=self.comma)

    def __str__(self) -> str:
        notes = [", log"] if self.log else []
        notes += [f", {self.width} intervals"] if self.cuts else []
        return f"{self.name} ({self.least:.12g} to {self.most:.12g}{''.join(notes)})"


@dataclass(frozen=True, kw_only=True)
class DateColumn(Measured):
    """A column of dates, as days since 1970; `form` is how they are written."""

    kind: ClassVar[str] = "date"

    form: str = ISO

    def read(self, column: Any) -> FloatArray:
        """Return the days until each date."""
        found = date_points(column, self.form)
        seconds = found.to_numpy(dtype="datetime64[us]").astype(np.int64) / 1e6
        return np.where(found.isna().to_numpy(), np.nan, seconds / _DAY)

    def __str__(self) -> str:
        return f"{self.name} ({_date_of(self.least)} to {_date_of(self.most)})"


@dataclass(frozen=True, kw_only=True)
class CategoryColumn:
    """A column of zeros and ones for each declared category, all zeros for any other."""

    kind: ClassVar[str] = "category"

    name: str
    values: tuple[str, ...]

    @property
    def width(self) -> int:
        """Numbers per cell."""
        return len(self.values)

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Least and largest value of each number."""
        return np.zeros(self.width), np.ones(self.width)

    def encode(self, column: Any) -> tuple[FloatArray, Array]:
        """Return the zeros and ones, and which cells are no declared category."""
        places = _places(self.values, category_words(column).tolist())
        is_one = places[:, None] == np.arange(self.width)
        return is_one.astype(np.float64), places < 0

    def __str__(self) -> str:
        return f"{self.name} ({self.width})"


SchemaColumn: TypeAlias = NumberColumn | DateColumn | CategoryColumn
_KINDS: Final[tuple[type[SchemaColumn], ...]] = (NumberColumn, CategoryColumn, DateColumn)


@dataclass(frozen=True, kw_only=True)
class SchemaLabel:
    """The column to predict: one of several classes, or a number between bounds."""

    name: str
    classes: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None


# The schema


@dataclass(frozen=True, eq=False, kw_only=True)
class Schema:
    """Declared columns of a table, and its label.

    Parameters
    ----------
    columns : sequence of columns
        Those to use, in the order of their numbers; a table may have others.
    label : SchemaLabel

    Examples
    --------
    >>> age = NumberColumn(name="age", least=0, most=100, usual=50)
    >>> town = CategoryColumn(name="town", values=("Bonn", "Ulm"))
    >>> schema = Schema(columns=(age, town), label=SchemaLabel(name="ill", classes=("0", "1")))
    >>> import pandas
    >>> table = pandas.DataFrame({"age": ["75", "120", "?"], "town": ["Ulm", "Bonn", "Kiel"]})
    >>> schema.encode(table).tolist()
    [[0.5, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """

    columns: tuple[SchemaColumn, ...]
    label: SchemaLabel

    # Files

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        """Read a schema; raise `InvalidData` that names each of its defects."""
        path = Path(path).expanduser()
        require(path.is_file(), "Schema", "schema", "a file that exists", str(path))
        try:
            require_data(
                path.stat().st_size <= LARGEST_FILE,
                path.name,
                "the file",
                f"of at most {LARGEST_FILE} bytes",
                path.stat().st_size,
            )
            text = path.read_text(encoding="utf-8-sig")
            given = json.loads(text, object_pairs_hook=_without_repeats)
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidData):
                raise
            raise InvalidData(f"{path.name}: the schema must be JSON, got {error}.") from error
        return cls.of(given, path.name)

    @classmethod
    def of(cls, given: Any, owner: str = "Schema") -> "Schema":
        """Return the schema that plain values describe, as a file has them."""
        defects = _Defects()
        whole = defects.mapping("the schema", given)
        defects.known("the schema", whole, ("about", "label", "columns"))
        label = _read_label(defects, whole.get("label"))
        columns: list[SchemaColumn] = []
        described = defects.mapping("columns", whole.get("columns"))
        for name, column in described.items():
            read = _read_column(defects, name, column)
            columns += [] if read is None else [read]
        if label is not None and label.name in described:
            defects.add(f"the label {label.name!r} is among the columns")
        if not described:
            defects.add("columns must have at least one column")
        defects.check(owner)
        assert label is not None  # noqa: S101 - without one there is a defect
        return cls(columns=tuple(columns), label=label)

    def save(self, path: str | Path) -> None:
        """Write the schema, with what nobody may forget on top."""
        whole = json.dumps({"about": ABOUT, **self.to_plain()}, indent=1, ensure_ascii=False)
        replace_file(Path(path), (_on_lines(whole) + "\n").encode(), SHARED)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        label: dict[str, Any] = {"name": self.label.name}
        if self.label.classes:
            label["classes"] = [*self.label.classes]
        else:
            label |= {"least": self.label.least, "most": self.label.most}
        return {"label": label, "columns": {c.name: _plain(c) for c in self.columns}}

    @cached_property
    def hash(self) -> str:
        """What server and parties compare: a hash of the meaning, not of the file's bytes."""
        whole = self.to_plain()
        whole["columns"] = [[name, column] for name, column in whole["columns"].items()]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    # Tables

    @property
    def width(self) -> int:
        """Numbers per row."""
        return sum(column.width for column in self.columns)

    @cached_property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Least and largest value of every number, for `FedMoments`."""
        low, high = zip(*(column.bounds for column in self.columns), strict=True)
        return np.concatenate(low), np.concatenate(high)

    @property
    def longest_row(self) -> float:
        """The most that a row is long: a column has one 1 at most, however wide it is."""
        return math.sqrt(len(self.columns))

    @property
    def row_length(self) -> float:
        """What rows are usually long, beyond which they are better shortened under noise.

        Bounds of numbers are taken for three deviations from the usual value.
        """
        num_numbers = sum(isinstance(c, Measured) and not c.cuts for c in self.columns)
        return math.sqrt(len(self.columns) - num_numbers * (1 - _SPREAD**2))

    def label_name(self, asked: str = "") -> str:
        """Return the label column, which nobody may ask to be another one."""
        rule = f"omitted, or {self.label.name!r} as in the schema"
        require(asked in ("", self.label.name), "Schema", "label", rule, asked)
        return self.label.name

    @property
    def targets(self) -> Targets | None:
        """How a numeric label is read; None for classes."""
        if self.label.least is None or self.label.most is None:
            return None
        return Targets.declared(self.label.name, self.label.least, self.label.most)

    @property
    def target_bounds(self) -> tuple[FloatArray, FloatArray] | None:
        """Bounds of a numeric label; None for classes."""
        if self.label.least is None or self.label.most is None:
            return None
        return np.array([self.label.least]), np.array([self.label.most])

    def encode(self, table: Any, owner: str = "Schema") -> FloatArray:
        """Return the rows of a data frame as numbers; `owner` names its file in the log.

        A column that the table has not is full of gaps. How many cells do not fit stands in
        the reader's own log and nowhere else.
        """
        names = [str(name) for name in table.columns]
        missing = [column.name for column in self.columns if column.name not in names]
        if len(missing) == len(self.columns):
            rule = f"some of the schema's ({listed(missing)})"
            require_data(False, owner, "the columns", rule, listed(names))
        if missing:
            logger.warning(
                "%s: columns of the schema that are missing, and so gaps: %s.",
                owner,
                listed([_with_hint(name, names) for name in missing]),
            )
        parts: list[FloatArray] = []
        for column in self.columns:
            if column.name in missing:
                parts.append(np.zeros((len(table), column.width)))
                continue
            encoded, gaps = column.encode(table[column.name])
            unread = int(np.sum(texts(table[column.name][gaps]) != "")) if gaps.any() else 0
            if unread:
                logger.warning(
                    "%s: %d values of column %r are not what the schema says there, and "
                    "count as gaps.",
                    owner,
                    unread,
                    column.name,
                )
            parts.append(encoded)
        return np.concatenate(parts, axis=1).astype(np.float32)

    def class_indices(self, column: Any, owner: str = "Schema") -> IntArray:
        """Return the class of each row, and `UNLABELLED` for one that is in no declared class.

        Raise `InvalidData` if no row is in one.
        """
        labels = label_texts(column).tolist()
        found = _places(self.label.classes, labels)
        rule = f"in the schema's classes {listed(self.label.classes)}"
        known = bool((found >= 0).any()) or not len(found)
        require_data(known, owner, f"label {self.label.name!r}", rule, "others only")
        gaps = np.array([label in MISSING for label in labels], dtype=bool)
        unknown = int(((found < 0) & ~gaps).sum())
        if unknown:
            logger.warning(
                "%s: %d labels are not %s, and count as missing.", owner, unknown, rule
            )
        return np.where(found < 0, UNLABELLED, found)

    def describe(self, name: str = "the schema") -> list[str]:
        """Return a line for the schema, and one for each kind of column."""
        declared = f"as {name} declares (hash {self.hash[:12]})"
        lines = [f"{len(self.columns)} columns become {self.width} numbers, {declared}"]
        for kind, plural in zip(_KINDS, ("numbers", "categories", "dates"), strict=True):
            found = [str(column) for column in self.columns if isinstance(column, kind)]
            lines += [f"{plural} ({len(found)}): {listed(found)}"] if found else []
        return lines


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, which may not say two things about one name."""
    twice = _repeated([name for name, _ in pairs])
    if twice:
        raise ValueError(f"{listed(twice)} twice")
    return dict(pairs)


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


def _places(known: Sequence[str], found: Sequence[str]) -> IntArray:
    """Return the place of each word, however its letters and whole numbers are written."""
    exact = {value: place for place, value in enumerate(known)}
    folded: dict[str, int] = {}
    for value, place in exact.items():
        key = value.casefold()
        folded[key] = -1 if key in folded else place
    return np.array([exact.get(word, _near(folded, word)) for word in found], dtype=np.int64)


def _near(folded: Mapping[str, int], word: str) -> int:
    key = word.casefold()
    return folded.get(key, folded.get(key.removesuffix(".0"), -1))


def _with_hint(name: str, names: Sequence[str]) -> str:
    hint = nearest_name(name, names)
    return f"{name}{f' (is it {hint!r}?)' if hint else ''}"


def _date_of(days: float) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=days)).isoformat()


# Plain values


def _plain(column: SchemaColumn) -> dict[str, Any]:
    if isinstance(column, CategoryColumn):
        return {"type": column.kind, "values": [*column.values]}
    shown = _date_of if isinstance(column, DateColumn) else _number
    plain: dict[str, Any] = {
        "type": column.kind,
        "least": shown(column.least),
        "most": shown(column.most),
    }
    if column.usual is not None:
        plain["usual"] = shown(column.usual)
    if column.cuts:
        plain["cuts"] = [shown(cut) for cut in column.cuts]
    if isinstance(column, DateColumn):
        return plain | ({} if column.form == ISO else {"format": column.form})
    return plain | {name: True for name in ("log", "comma") if getattr(column, name)}


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _on_lines(text: str) -> str:
    """Return JSON with each column and list on a line of its own, which people can read."""
    lines: list[str] = []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        inner = depth >= 3 or (depth == 2 and lines and lines[-1].endswith("["))
        closes = depth == 2 and line.lstrip()[:1] in "]}" and bool(lines)
        if lines and (inner or closes):
            space = "" if lines[-1].endswith(("{", "[")) or line.lstrip()[:1] in "]}" else " "
            lines[-1] += space + line.lstrip()
        else:
            lines.append(line)
    return "\n".join(lines)


class _Defects:
    """What is wrong with a schema, to be told at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, text: str) -> None:
        self.found.append(text)

    def check(self, owner: str) -> None:
        """Raise `InvalidData` if there are some."""
        if self.found:
            shown = "; ".join(self.found[:MOST_DEFECTS])
            more = len(self.found) - MOST_DEFECTS
            rest = f"; and {more} more" if more > 0 else ""
            raise InvalidData(f"{owner}: the schema must be sound, got: {shown}{rest}.")

    def mapping(self, what: str, given: Any) -> Mapping[str, Any]:
        """Return given values by name, or none."""
        if isinstance(given, dict):
            return given
        self.add(f"{what} must be names with values in braces")
        return {}

    def known(self, what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
        """Note keys that mean nothing."""
        for key in given:
            if key not in names:
                hint = nearest(key, names)
                self.add(f"{what} has the unknown key {key!r} ({hint})")

    def number(self, what: str, given: Any) -> float:
        """Return a finite number, or NaN."""
        if isinstance(given, bool) or not isinstance(given, int | float):
            self.add(f"{what} must be a number, got {_shown(given)}")
            return math.nan
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or abs(value) > 1e30:
            self.add(f"{what} must be a number up to 1e30, got {_shown(given)}")
            return math.nan
        return value

    def date(self, what: str, given: Any) -> float:
        """Return days since 1970 of a date such as 2024-01-31, or NaN."""
        try:
            day = datetime.date.fromisoformat(given)
        except (ValueError, TypeError):
            self.add(f"{what} must be a date such as 2024-01-31, got {_shown(given)}")
            return math.nan
        return float((day - datetime.date(1970, 1, 1)).days)

    def names(self, what: str, given: Any, least: int) -> tuple[str, ...]:
        """Return different names that a cell can have."""
        fits = isinstance(given, list) and all(type(v) in (str, int, bool) for v in given)
        if not fits:
            self.add(f"{what} must be a list of names, got {_shown(given)}")
            return ()
        values = tuple(str(value).strip() for value in given)
        twice = _repeated(values)
        if twice:
            self.add(f"{what} must be different, got {listed(twice)} twice")
        gaps = [value for value in values if value in MISSING]
        if gaps:
            self.add(f"{what} must be other words than those for gaps, got {listed(gaps)!r}")
        if len({*values}) < least:
            self.add(f"{what} must be at least {least}, got {len(values)}")
        return values


def _shown(value: Any) -> str:
    return "none" if value is None else f"{str(value)[:40]!r}"


_BOUNDED: Final = ("type", "least", "most", "usual", "cuts")
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "number": (*_BOUNDED, "log", "comma"),
    "date": (*_BOUNDED, "format"),
    "category": ("type", "values"),
}


def _read_column(defects: _Defects, name: str, given: Any) -> SchemaColumn | None:
    what, before = f"column {name!r}", len(defects.found)
    column = defects.mapping(what, given)
    kind = column.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        if isinstance(given, dict):
            defects.add(f"{what} must have a type, {', '.join(_KEYS)}, got {_shown(kind)}")
        return None
    defects.known(what, column, _KEYS[kind])
    if kind == "category":
        values = defects.names(f"{what}: values", column.get("values"), 1)
        spelt = tuple(v.capitalize() if v.lower() in ("true", "false") else v for v in values)
        return CategoryColumn(name=name, values=spelt)
    read = defects.number if kind == "number" else defects.date
    least, most = (read(f"{what}: {key}", column.get(key)) for key in ("least", "most"))
    if least >= most:
        defects.add(f"{what}: least must be below most")
    usual = read(f"{what}: usual", column["usual"]) if "usual" in column else None
    if usual is not None and not (math.isnan(usual) or least <= usual <= most):
        defects.add(f"{what}: usual must be between least and most")
    given_cuts = column.get("cuts", [])
    if not isinstance(given_cuts, list):
        defects.add(f"{what}: cuts must be a list, got {_shown(given_cuts)}")
        given_cuts = []
    cuts = tuple(read(f"{what}: cuts", cut) for cut in given_cuts)
    ends = (least, *cuts, most)
    if any(one >= other for one, other in itertools.pairwise(ends)) and cuts:
        defects.add(f"{what}: cuts must ascend between least and most")
    for key in ("log", "comma"):
        if type(column.get(key, False)) is not bool:
            defects.add(f"{what}: {key} must be true or false, got {_shown(column[key])}")
    form = column.get("format", ISO)
    if not isinstance(form, str):
        defects.add(f"{what}: format must be a text such as %d.%m.%Y, got {_shown(form)}")
    if len(defects.found) > before:
        return None
    shape: dict[str, Any] = {"name": name, "least": least, "most": most}
    shape |= {"usual": usual, "cuts": cuts}
    if kind == "date":
        return DateColumn(**shape, form=form)
    return NumberColumn(**shape, log=bool(column.get("log")), comma=bool(column.get("comma")))


def _read_label(defects: _Defects, given: Any) -> SchemaLabel | None:
    before = len(defects.found)
    label = defects.mapping("label", given)
    if not label:
        return None
    defects.known("label", label, ("name", "classes", "least", "most"))
    name = label.get("name")
    if not isinstance(name, str) or not name:
        defects.add(f"label must have the name of a column, got {_shown(name)}")
    least = most = None
    classes: tuple[str, ...] = ()
    if "classes" in label:
        classes = defects.names("label: classes", label["classes"], 2)
        if "least" in label or "most" in label:
            defects.add("label must have classes, or numbers with least and most, got both")
    elif {"least", "most"} & {*label}:
        least, most = (
            defects.number(f"label: {key}", label.get(key)) for key in ("least", "most")
        )
        if least >= most:
            defects.add("label: least must be below most")
    else:
        defects.add("label must have classes, or least and most of numbers")
    if len(defects.found) > before:
        return None
    return SchemaLabel(name=str(name), classes=classes, least=least, most=most)
