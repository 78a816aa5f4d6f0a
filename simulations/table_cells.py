"""Cells of a table: what is missing, and texts that are numbers or dates."""

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray

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
