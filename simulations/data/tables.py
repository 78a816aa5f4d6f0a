"""Tables as people have them: cells read one by one as text, columns understood by public rows.

Public rows alone decide which columns are numbers, dates, categories or of no use, what
stands for a missing value, and the scale. A private cell that does not fit becomes a missing
value or another category, never an error: that a party fails would tell about a record.
"""

import csv
import difflib
import gzip
import io
import logging
import lzma
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray, import_library
from fl_strategies.errors import InvalidData, InvalidParameter, require_data
from simulations.data.files import LARGEST, class_indices, public_scale

logger = logging.getLogger("flwr.fl_strategies")

# Files

PARQUET: Final = ".parquet"
TABLES: Final = (".csv", ".csv.gz", ".csv.xz", PARQUET)
_OPEN: Final[Mapping[str, Callable[[Path, str], Any]]] = MappingProxyType(
    {".gz": gzip.open, ".xz": lzma.open}
)
_SEPARATORS: Final = ",;\t|"
_LONGEST_HEADER: Final = 1 << 20
_LONGEST_CELL: Final = 2**31 - 1
_MOST_NAMED: Final = 20


def import_pandas(path: Path) -> ModuleType:
    """Import pandas, and make sure of what it needs for this kind of file."""
    if path.name.endswith(PARQUET):
        import_library(path.name, "pyarrow", "simulation")
    return import_library(path.name, "pandas", "simulation")


def read_table(path: Path) -> Any:
    """Return a file as a data frame of texts, or of the types that a parquet file declares.

    The header alone decides how columns are separated. No type is inferred from cells, as one
    record would then decide how all others are read. A line of too many or too few cells is
    cut or filled, and a byte that means nothing is replaced: no record makes a party fail.
    """
    pandas = import_pandas(path)
    try:
        if path.name.endswith(PARQUET):
            return pandas.read_parquet(path).rename(columns=str)
        header, encoding = _header(path)
        separator = max(_SEPARATORS, key=header.count)
        names = pandas.read_csv(
            io.StringIO(header), sep=separator, nrows=0, skipinitialspace=True
        ).columns
        with _OPEN.get(path.suffix, open)(path, "rb") as file:
            lines = io.TextIOWrapper(file, encoding=encoding, errors="replace")
            rows = _rows(lines, separator, len(names))
        return pandas.DataFrame(rows, columns=names, dtype=object)
    except (OSError, ValueError, EOFError, csv.Error, lzma.LZMAError) as error:
        raise InvalidData(f"{path.name}: the file must be a table, got {error}.") from error


def _rows(lines: Iterable[str], separator: str, width: int) -> list[list[str]]:
    """Return the cells below a header, in rows of this width."""
    # By default Python refuses a cell beyond 128 KiB, which would be an error of one record.
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    next(reader, None)
    return [line[:width] + [""] * (width - len(line)) for line in reader if line]


def _header(path: Path) -> tuple[str, str]:
    """Return the first line, and the encoding that it shows: UTF-8 or that of Windows."""
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        line: bytes = file.readline(_LONGEST_HEADER)
    try:
        return line.decode("utf-8-sig"), "utf-8-sig"
    except UnicodeDecodeError:
        return line.decode("cp1252", errors="replace"), "cp1252"


# Names of columns


def listed(names: Sequence[object], most: int = _MOST_NAMED) -> str:
    """Return names with commas between them, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(map(str, names[:most])) + more


def require_label(owner: str, label: str, columns: Sequence[str]) -> None:
    """Raise `InvalidParameter`, with what there is, unless the label is a column."""
    if label in columns:
        return
    if not label:
        raise InvalidParameter(
            f"{owner}: label must be given (--label COLUMN on the command line), got none. "
            f"The columns are {listed(columns)}."
        )
    raise InvalidParameter(
        f"{owner}: label (--label, setting label) must be one of the columns, "
        f"{_but_got(label, columns)}"
    )


def names_in(text: str) -> tuple[str, ...]:
    """Return the columns that a list with commas names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def dropped(owner: str, drop: str, columns: Sequence[str], label: str = "") -> tuple[str, ...]:
    """Return the columns that a list with commas names to drop; raise for one that is missing.

    Examples
    --------
    >>> dropped("pets.csv", "name, chip", ["name", "age", "chip"])
    ('name', 'chip')
    """
    names = names_in(drop)
    for name in names:
        if name == label:
            raise InvalidParameter(
                f"{owner}: drop must be other columns than the label, got {name!r}."
            )
        if name not in columns:
            raise InvalidParameter(
                f"{owner}: drop must be columns of the table, {_but_got(name, columns)}"
            )
    return names


def _but_got(name: str, columns: Sequence[str]) -> str:
    """Return the end of a sentence about a missing column, with the nearest one."""
    plain = {str(column).lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), plain, n=1)
    hint = f"Did you mean {plain[close[0]]!r}? " if close else ""
    return f"got {name!r}, which is missing. {hint}The columns are {listed(columns)}."


# Cells

MISSING: Final = (
    "",
    *("?", "-", "--", ".", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"),
    *("NA", "N/A", "#N/A", "<NA>", "NaN", "NAN", "NULL", "None", "missing"),
)
"""Words that stand for nothing, as people and programs write them."""
_TRUTH: Final = {"true": 1.0, "false": 0.0}
_NUMERIC: Final = "biufc"
"""Kinds of types that are numbers."""
_CURRENCY = re.compile(r"[$€£¥₹]|\b(?:USD|EUR|GBP|CHF|JPY|INR)\b", re.IGNORECASE)
_GROUP_GAP = re.compile(r"(?<=\d)[\s'\u2019](?=\d{3}(?!\d))")
_POINT = re.compile(
    r"[+-]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE
)
_COMMA = re.compile(
    r"[+-]?(?:[1-9]\d{0,2}(?:\.\d{3})+|\d+)(?:,\d+)?(?:e[+-]?\d+)?", re.IGNORECASE
)
_PLAIN = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_DAYS: Final = (
    *("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y"),
    *("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y"),
    *("%b %d, %Y", "%B %d, %Y"),
)
_TIMES: Final = ("", " %H:%M", " %H:%M:%S")
ISO: Final = "ISO8601"
_FORMATS: Final = (ISO, *(day + time for time in _TIMES for day in _DAYS), "%Y-%m", "%m/%Y")
_ISO_DAY = re.compile(r"\d{4}-\d{2}-\d{2}(?:[ T].*)?")
_BELOW_MICROSECONDS = re.compile(r"(\.\d{6})\d+")


def texts(column: Any) -> Array:
    """Return a column as texts without spaces around them, and missing cells as empty ones.

    Whole numbers have no decimal point, whatever type a file gave them.
    """
    if column.dtype.kind == "f":
        cells = column.to_numpy(dtype=np.float64, na_value=np.nan).tolist()
        plain = [str(int(cell) if cell.is_integer() else cell) for cell in cells]
    else:
        plain = column.tolist()
        if not all(type(cell) is str for cell in plain):
            plain = column.astype(object).where(column.notna(), "").astype(str).tolist()
    stripped = (text.strip() for text in plain)
    nothing = frozenset(MISSING)
    return np.array(["" if text in nothing else text for text in stripped], dtype=object)


def only_texts(owner: str, table: Any) -> Array:
    """Return the one column of a table as texts, for an encoder of texts."""
    columns = [str(name) for name in table.columns]
    rule = "one beside the label with an encoder (the setting drop names those to ignore)"
    require_data(len(columns) == 1, owner, "the columns", rule, listed(columns))
    return texts(table.iloc[:, 0])


def number_of(text: str, *, comma: bool, lenient: bool = False) -> float:
    """Return the number that a text shows, infinity beyond float64; NaN for none.

    Parameters
    ----------
    text : str
        Perhaps with a currency, a percent sign and separators between thousands.
    comma : bool
        Whether a comma, not a point, comes before decimals.
    lenient : bool (default: False)
        Take the other way to write if the text cannot be meant in this one.

    Examples
    --------
    >>> number_of("$ 1,234.50", comma=False), number_of("1.234,50 EUR", comma=True)
    (1234.5, 1234.5)
    >>> number_of("12 %", comma=False), number_of("about 40", comma=False)
    (0.12, nan)
    """
    if not comma and _PLAIN.fullmatch(text):  # most cells are such, and soon read
        return float(text)
    if not text:
        return float("nan")
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    bare = _GROUP_GAP.sub("", _CURRENCY.sub("", text).replace("\u2212", "-").strip())
    if _INFINITE.fullmatch(bare):
        return float(bare)
    share = bare.endswith("%")
    bare = bare.removesuffix("%").strip()
    for style in [comma, not comma] if lenient else [comma]:
        if (_COMMA if style else _POINT).fullmatch(bare):
            point = bare.replace(".", "").replace(",", ".") if style else bare.replace(",", "")
            return float(point) / (100 if share else 1)
    return float("nan")


def decimal_comma(values: Sequence[str]) -> bool | None:
    """Return how all of some texts write decimals, or None if some are no numbers.

    What can be read in both ways, such as ``1,234``, has a separator between thousands.

    Examples
    --------
    >>> decimal_comma(["1,234", "7"]), decimal_comma(["3,14", "0,125"]), decimal_comma(["x"])
    (False, True, None)
    """
    for comma in (False, True):
        if all(not np.isnan(number_of(text, comma=comma)) for text in values):
            return comma
    return None


def numbers(column: Any, *, comma: bool) -> FloatArray:
    """Return a column as finite numbers, and NaN for what is none."""
    if column.dtype.kind in _NUMERIC:
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        read = [number_of(text, comma=comma, lenient=True) for text in texts(column).tolist()]
        found = np.array(read, dtype=np.float64)
    return np.clip(np.where(np.isfinite(found), found, np.nan), -LARGEST, LARGEST)


def _dates(values: Sequence[str], form: str) -> Any:
    """Return texts as points in time, and NaT for what is none."""
    if form == ISO:
        # One cell with more digits would change the range of dates that all can have.
        iso = [text if _ISO_DAY.fullmatch(text) else "" for text in values]
        values = [_BELOW_MICROSECONDS.sub(r"\1", text) for text in iso]
    pandas = import_library("dates", "pandas", "simulation")
    found = pandas.to_datetime(
        pandas.Series(list(values), dtype=object), format=form, errors="coerce", utc=True
    )
    return found.dt.tz_localize(None)


def _date_format(values: Sequence[str]) -> str | None:
    """Return the one way in which all of some texts write a date, or None."""
    for form in _FORMATS:
        # Most formats fail at the first text, so that the others need not be tried.
        if all(_dates(some, form).notna().all() for some in (values[:1], values)):
            return form
    return None


def _are_mixed_dates(values: Sequence[str]) -> bool:
    """Return whether all of some texts are dates, in whichever way each is written."""
    left = list(values)
    for form in _FORMATS:
        unread = _dates(left, form).isna()
        left = [text for text, is_left in zip(left, unread, strict=True) if is_left]
    return not left


# Columns

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
_EMPTY: Final = "empty"
_CONSTANT: Final = "always the same"
_ID: Final = "an id"
_FREE_TEXT: Final = "free text"
_ALL_DIFFERENT: Final = "different in every row"


@dataclass(frozen=True, kw_only=True)
class Measures:
    """A column of numbers or dates; public medians stand for a missing cell."""

    name: str
    fills: tuple[float, ...]
    indicator: bool
    """Whether missing cells are marked, because public rows have some."""

    @property
    def width(self) -> int:
        """Numbers per cell."""
        return len(self.fills) + self.indicator

    def read(self, column: Any) -> FloatArray:
        """Return the numbers in every cell, (num_rows, num_numbers); NaN for none."""
        raise NotImplementedError

    def encode(self, column: Any) -> tuple[FloatArray, Array]:
        """Return what cells become, and which of them could not be read."""
        found = self.read(column)
        missing = np.isnan(found[:, 0])
        parts = [np.where(missing[:, None], self.fills, found)]
        parts += [missing[:, None]] if self.indicator else []
        return np.concatenate(parts, axis=1), missing


@dataclass(frozen=True, kw_only=True)
class Numbers(Measures):
    """A column of numbers."""

    kind: ClassVar[str] = "numbers"

    comma: bool
    example: str = ""
    """A public text that was not a plain number."""

    def read(self, column: Any) -> FloatArray:
        """Return the numbers in one column."""
        return numbers(column, comma=self.comma)[:, None]

    def __str__(self) -> str:
        notes = ["decimal comma"] if self.comma else []
        if self.example:
            read = number_of(self.example, comma=self.comma)
            notes.append(f"{self.example!r} is {read:.12g}")
        notes += ["missing ones marked"] if self.indicator else []
        return f"{self.name} ({', '.join(notes)})" if notes else self.name


@dataclass(frozen=True, kw_only=True)
class Dates(Measures):
    """A column of dates, as those of their parts that vary in public rows."""

    kind: ClassVar[str] = "dates"

    form: str
    parts: tuple[str, ...]

    def read(self, column: Any) -> FloatArray:
        """Return the parts of every date."""
        return _parts(date_points(column, self.form), self.parts)

    def __str__(self) -> str:
        written = "" if self.form == ISO else f"{self.form}: "
        marked = ", missing ones marked" if self.indicator else ""
        return f"{self.name} ({written}{', '.join(self.parts)}{marked})"


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A column of zeros and ones for each public category, all zeros for any other."""

    kind: ClassVar[str] = "categories"

    name: str
    values: tuple[str, ...]
    num_rare: int = 0

    @property
    def width(self) -> int:
        """Numbers per cell."""
        return len(self.values)

    def encode(self, column: Any) -> tuple[FloatArray, Array]:
        """Return the zeros and ones; every text is readable."""
        places = {value: place for place, value in enumerate(self.values)}
        found = np.array([places.get(word, -1) for word in category_words(column)], np.int64)
        is_one = found[:, None] == np.arange(self.width)
        return is_one.astype(np.float64), np.zeros(len(found), dtype=bool)

    def __str__(self) -> str:
        rare = f" of {self.width + self.num_rare}" if self.num_rare else ""
        return f"{self.name} ({self.width}{rare})"


Column: TypeAlias = Numbers | Dates | Categories


@dataclass(frozen=True, eq=False, kw_only=True)
class TableEncoder:
    """Encoder of tables as numbers, fitted on public rows; see `learn`."""

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
            Public rows, without a label; its index is the row of the file.
        drop : collection of str
            Columns to drop.
        """
        columns: list[Column] = []
        dropped: dict[str, str] = {}
        for name in public.columns:
            found = "asked for" if name in drop else _decide(owner, public[name])
            if isinstance(found, str):
                dropped[str(name)] = found
            else:
                columns.append(found)
        reasons = [f"{name} ({why})" for name, why in dropped.items()] or ["one column"]
        rule = "a label and other columns of use"
        require_data(bool(columns), owner, "the table", rule, listed(reasons))
        return cls(
            columns=tuple(columns),
            dropped=dropped,
            num_public=len(public),
            scale=public_scale(_encode(owner, columns, public)),
        )

    @property
    def width(self) -> int:
        """Numbers per row."""
        return sum(column.width for column in self.columns)

    def encode(self, owner: str, table: Any) -> FloatArray:
        """Return rows as numbers on the public scale; `owner` names their file."""
        return self.scale(_encode(owner, self.columns, table))

    def describe(self) -> list[str]:
        """Return a line for each kind of column; public facts only."""
        total = len(self.columns) + len(self.dropped)
        by = f"as {self.num_public} public rows say"
        lines = [f"{total} columns beside the label become {self.width} numbers, {by}"]
        kinds: dict[str, list[str]] = {"numbers": [], "dates": [], "categories": []}
        for column in self.columns:
            kinds[column.kind].append(str(column))
        kinds["dropped"] = [f"{name} ({why})" for name, why in self.dropped.items()]
        lines += [
            f"{kind} ({len(names)}): {listed(names)}" for kind, names in kinds.items() if names
        ]
        return lines


def _encode(owner: str, columns: Collection[Column], table: Any) -> FloatArray:
    parts = []
    for column in columns:
        encoded, missing = column.encode(table[column.name])
        parts.append(encoded)
        unreadable = missing.any() and texts(table[column.name][missing]) != ""
        if np.any(unreadable):
            logger.warning(
                "%s: %d values of column %r are not what the public rows have there, and "
                "count as missing.",
                owner,
                np.sum(unreadable),
                column.name,
            )
    return np.concatenate(parts, axis=1)


def _decide(owner: str, column: Any) -> Column | str:
    """Return the meaning of a column, or why it is of no use."""
    if column.dtype.kind == "M":
        return _learn_dates(column, ISO) if column.notna().any() else _EMPTY
    if column.dtype.kind in _NUMERIC:
        return _learn_numbers(column, comma=False)
    words, name = category_words(column), str(column.name)
    present = sorted({*words.tolist()} - {""})
    if not present:
        return _EMPTY
    comma = decimal_comma(present)
    if comma is not None:
        repaired = [text for text in present if not _is_plain(text)]
        return _learn_numbers(column, comma=comma, example=max(repaired, key=len, default=""))
    form = _date_format(present)
    if form is not None:
        return _learn_dates(column, form)
    others = [text for text in present if decimal_comma([text]) is None]
    if len(present) > FEW_VALUES and len(others) < len(present) / 2:
        raise InvalidData(
            f"{owner}: column {name!r} must be numbers, as most of its public values are, or "
            f"text, got {others[0][:40]!r}. Repair such values, or drop the column "
            f"(--drop {name}, setting drop)."
        )
    found = _learn_categories(name, words)
    is_text = found in (_FREE_TEXT, _ALL_DIFFERENT)
    return "dates written in several ways" if is_text and _are_mixed_dates(present) else found


def _learn_numbers(column: Any, *, comma: bool, example: str = "") -> Numbers | str:
    found = numbers(column, comma=comma)
    present = found[~np.isnan(found)]
    if not len(present):
        return _EMPTY
    distinct, complete = len(np.unique(present)), len(present) == len(found)
    regular = complete and len(found) >= FEWEST_ROWS
    if distinct == 1 and regular:
        return _CONSTANT
    if (present % 1 == 0).all():
        if _is_id(str(column.name), distinct, len(present)):
            return _ID
        steps = found - column.index.to_numpy()
        if regular and (steps == steps[0]).all():
            return "numbers the rows"
    return Numbers(
        name=str(column.name),
        comma=comma,
        fills=(float(np.median(present)),),
        indicator=not complete,
        example=example,
    )


def _learn_dates(column: Any, form: str) -> Dates | str:
    points = date_points(column, form)
    found = _parts(points.dropna(), tuple(_PARTS))
    varies = found.std(axis=0) > 0
    if not varies.any():
        return _CONSTANT
    return Dates(
        name=str(column.name),
        form=form,
        parts=tuple(np.array([*_PARTS])[varies].tolist()),
        fills=tuple(np.median(found[:, varies], axis=0).tolist()),
        indicator=bool(points.isna().any()),
    )


def _learn_categories(name: str, words: Array) -> Categories | str:
    values, counts = np.unique(words, return_counts=True)
    present, distinct = int((words != "").sum()), len(values) - ("" in values)
    if len(values) == 1 and len(words) >= FEWEST_ROWS:
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


def _is_id(name: str, num_distinct: int, num_present: int) -> bool:
    named = _ID_NAME.search(name) is not None
    return named and num_distinct > 1 and num_distinct > num_present / 2


def category_words(column: Any) -> Array:
    """Return texts of which truth values have one spelling, however programs write them."""
    cells = texts(column)
    spelt = [cell.capitalize() if cell.lower() in _TRUTH else cell for cell in cells]
    return np.array(spelt, dtype=object)


def _is_plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in _TRUTH
    return True


def date_points(column: Any, form: str) -> Any:
    """Return a column as points in time, numbered from 0."""
    if column.dtype.kind != "M":
        return _dates(texts(column).tolist(), form)
    pandas = import_library("dates", "pandas", "simulation")
    return pandas.to_datetime(column, utc=True).dt.tz_localize(None).reset_index(drop=True)


def _parts(points: Any, parts: Sequence[str]) -> FloatArray:
    columns = [getattr(points.dt, _PARTS[part]) for part in parts]
    found = [column.to_numpy(dtype=np.float64, na_value=np.nan) for column in columns]
    return np.stack(found, axis=1)


# Labels

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
    words = label_texts(column)
    missing = np.array([word in MISSING for word in words], dtype=bool)
    try:
        numeric: Array | None = words[~missing].astype(np.float64)
    except ValueError:
        numeric, missing = None, np.asarray(words == "")
    present = words[~missing]
    if not len(present):
        rule = f"a column of classes, got {label!r} without a single value"
        raise InvalidData(f"{owner}: label must be {rule}.")
    distinct = len(np.unique(present if numeric is None else numeric))
    if numeric is not None:
        _require_classes(owner, label, numeric, distinct)
    else:
        found = f"{label!r} with {distinct} different texts in {len(present)} rows"
        rule = "a column of classes, each in several rows"
        few = distinct <= max(FEW_TEXTS, len(present) / 2)
        require_data(few, owner, "label", rule, found)
    labels = present.astype(np.str_) if numeric is None else numeric
    classes, (found_classes,) = class_indices(owner, (f"column {label!r}", labels))
    y = np.full(len(words), UNLABELLED, dtype=np.int64)
    y[~missing] = found_classes
    return classes, y


def label_texts(column: Any) -> Array:
    """Return labels as texts without spaces around them; empty where there is none."""
    plain = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    return np.array(plain.tolist(), dtype=object)


def _require_classes(owner: str, label: str, numeric: Array, distinct: int) -> None:
    whole = bool((np.isfinite(numeric) & (numeric == np.round(numeric))).all())
    if whole and distinct <= MOST_NUMBERS:
        return
    kind = "" if whole else ", not all of them whole"
    raise InvalidData(
        f"{owner}: label must be a column of classes, got {label!r} with {distinct} different "
        f"numbers{kind}. To predict numbers, write --set task=numbers. Or make classes of it "
        f"first, such as quarters: table[{label!r}] = pandas.qcut(table[{label!r}], 4, "
        "labels=['lowest', 'low', 'high', 'highest'])."
    )
