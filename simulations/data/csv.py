"""CSV files, read cell by cell as text."""

import csv
import difflib
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np

from fl_strategies._util import Array, FloatArray, import_library
from fl_strategies.errors import InvalidData, InvalidParameter

MISSING: Final = (
    "",
    *("?", "-", "--", ".", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"),
    *("NA", "N/A", "#N/A", "<NA>", "NaN", "NAN", "NULL", "None", "missing"),
)
"""Words that stand for nothing, as people and programs write them."""
_NOTHING: Final = frozenset(MISSING)
TRUTH: Final = {"true": 1.0, "false": 0.0}
LARGEST: Final = 1e100
"""Numbers beyond are cut to it, so that squares of them are still numbers."""

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
_DAYS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d-%m-%Y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%d.%m.%y",
    "%d %b %Y",
    "%d %B %Y",
    "%d-%b-%Y",
    "%b %d, %Y",
    "%B %d, %Y",
)
_TIMES = ("", " %H:%M", " %H:%M:%S")
ISO: Final = "ISO8601"
_FORMATS: Final = (ISO, *(day + time for time in _TIMES for day in _DAYS), "%Y-%m", "%m/%Y")
_ISO_DAY = re.compile(r"\d{4}-\d{2}-\d{2}(?:[ T].*)?")
_BELOW_MICROSECONDS = re.compile(r"(\.\d{6})\d+")


def texts(pandas: ModuleType, column: Any) -> Array:
    """Return a column as texts without spaces around them, and missing cells as empty ones.

    Whole numbers have no decimal point, whatever type a file gave them.
    """
    kind = pandas.api.types
    if kind.is_float_dtype(column.dtype):
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
        plain = [_plain(number) for number in numbers.tolist()]
    else:
        plain = column.tolist()
        if not all(type(cell) is str for cell in plain):
            plain = column.astype(object).where(column.notna(), "").astype(str).tolist()
        plain = [text.strip() for text in plain]
    return np.array(["" if text in _NOTHING else text for text in plain], dtype=object)


def _plain(number: float) -> str:
    if np.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() else str(number)


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
    if text.lower() in TRUTH:
        return TRUTH[text.lower()]
    bare = _GROUP_GAP.sub("", _CURRENCY.sub("", text).replace("\u2212", "-").strip())
    if _INFINITE.fullmatch(bare):
        return float(bare)
    share = bare.endswith("%")
    bare = bare.removesuffix("%").strip()
    styles = [comma, not comma] if lenient else [comma]
    for style in styles:
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


def numbers(pandas: ModuleType, column: Any, *, comma: bool) -> FloatArray:
    """Return a column as finite numbers, and NaN for what is none."""
    types = pandas.api.types
    if types.is_numeric_dtype(column.dtype):
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        cells = texts(pandas, column).tolist()
        read = [number_of(text, comma=comma, lenient=True) for text in cells]
        found = np.array(read, dtype=np.float64)
    finite = np.where(np.isfinite(found), found, np.nan)
    return np.clip(finite, -LARGEST, LARGEST)


def date_format(pandas: ModuleType, values: Sequence[str]) -> str | None:
    """Return the one way in which all of some texts write a date, or None."""
    for form in _FORMATS:
        # Most formats fail at the first text, so that the others need not be tried.
        few_fit = not parse_dates(pandas, values[:1], form).isna().any()
        if few_fit and not parse_dates(pandas, values, form).isna().any():
            return form
    return None


def mixed_dates(pandas: ModuleType, values: Sequence[str]) -> bool:
    """Return whether all of some texts are dates, in whichever way each is written."""
    left = list(values)
    for form in _FORMATS:
        unread = parse_dates(pandas, left, form).isna()
        left = [text for text, is_left in zip(left, unread, strict=True) if is_left]
        if not left:
            return True
    return False


def parse_dates(pandas: ModuleType, values: Sequence[str], form: str) -> Any:
    """Return texts as points in time, and NaT for what is none."""
    if form == ISO:
        # One cell with more digits would change the range of dates that all can have.
        iso = [text if _ISO_DAY.fullmatch(text) else "" for text in values]
        values = [_BELOW_MICROSECONDS.sub(r"\1", text) for text in iso]
    found = pandas.to_datetime(
        pandas.Series(list(values), dtype=object), format=form, errors="coerce", utc=True
    )
    return found.dt.tz_localize(None)


PARQUET: Final = ".parquet"
TABLES: Final = (".csv", ".csv.gz", ".csv.xz", PARQUET)
_OPEN: Final[Mapping[str, Callable[[Path, str], Any]]] = MappingProxyType(
    {".gz": gzip.open, ".xz": lzma.open}
)
_SEPARATORS: Final = ",;\t|"
_LONGEST_HEADER: Final = 1 << 20
_MOST_NAMED: Final = 20
_LONGEST_CELL: Final = 2**31 - 1


def import_pandas(path: Path) -> ModuleType:
    """Import pandas, and make sure of what it needs for this kind of file."""
    if path.name.endswith(PARQUET):
        import_library(path.name, "pyarrow", "simulation")
    return import_library(path.name, "pandas", "simulation")


def read_table(path: Path) -> Any:
    """Return a file as a data frame of texts, or of the types that a parquet file declares.

    The header alone tells how columns are separated. No type is inferred from cells, as one
    record would then decide how all others are read. A line of too many or too few cells is
    cut or filled, and a byte that means nothing is replaced: no record makes a party fail.
    """
    pandas = import_pandas(path)
    try:
        if path.name.endswith(PARQUET):
            return pandas.read_parquet(path).rename(columns=str)
        header, encoding = _header(path)
        separator = _separator(header)
        names = pandas.read_csv(
            io.StringIO(header), sep=separator, nrows=0, skipinitialspace=True
        ).columns
        with _OPEN.get(path.suffix, open)(path, "rb") as file:
            lines = io.TextIOWrapper(file, encoding=encoding, errors="replace")
            return _cells(pandas, names, separator, lines)
    except (OSError, ValueError, EOFError, csv.Error, lzma.LZMAError) as error:
        raise InvalidData(f"{path.name}: the file must be a table, got {error}.") from error


def _cells(pandas: ModuleType, names: Any, separator: str, lines: Iterable[str]) -> Any:
    """Return lines below a header as a data frame of texts."""
    # By default Python refuses a cell beyond 128 KiB, which would be an error of one record.
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    next(reader, None)
    width = len(names)
    rows = [line[:width] + [""] * (width - len(line)) for line in reader if line]
    return pandas.DataFrame(rows, columns=names, dtype=object)


def _header(path: Path) -> tuple[str, str]:
    """Return the first line, and the encoding that it shows: UTF-8 or that of Windows."""
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        line: bytes = file.readline(_LONGEST_HEADER)
    try:
        return line.decode("utf-8-sig"), "utf-8-sig"
    except UnicodeDecodeError:
        return line.decode("cp1252", errors="replace"), "cp1252"


def _separator(header: str) -> str:
    """Return the sign that the header has most of; a comma if it has none.

    Examples
    --------
    >>> _separator("age;income, yearly;town"), _separator("age")
    (';', ',')
    """
    return max(_SEPARATORS, key=header.count)


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
        f"{owner}: label (--label, setting label) must be one of the columns, got {label!r}, "
        f"which is missing. {_nearest(label, columns)}The columns are {listed(columns)}."
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
                f"{owner}: drop must be columns of the table, got {name!r}, which is missing. "
                f"{_nearest(name, columns)}The columns are {listed(columns)}."
            )
    return names


def _nearest(name: str, columns: Sequence[str]) -> str:
    plain = {str(column).lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), plain, n=1)
    return f"Did you mean {plain[close[0]]!r}? " if close else ""
