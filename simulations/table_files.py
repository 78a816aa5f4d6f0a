"""Tables in files: read as they stand, before anybody says what a column means."""

import csv
import difflib
import gzip
import io
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from fl_strategies.exceptions import InvalidData, InvalidParameter
from simulations.libraries import import_library

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
