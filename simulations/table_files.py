"""Tables in files: read as they stand, before anybody says what a column means."""

import difflib
import gzip
import io
import lzma
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from fl_strategies.exceptions import InvalidData, InvalidParameter
from simulations.libraries import import_library
from simulations.table_cells import MISSING

PARQUET: Final = ".parquet"
TABLES: Final = (".csv", ".csv.gz", ".csv.xz", PARQUET)
_OPEN: Final[Mapping[str, Callable[[Path, str], Any]]] = MappingProxyType(
    {".gz": gzip.open, ".xz": lzma.open}
)
_SEPARATORS: Final = ",;\t|"
_LONGEST_HEADER: Final = 1 << 20
_MOST_NAMED: Final = 20


def import_pandas(path: Path) -> ModuleType:
    """Import pandas, and make sure of what it needs for this kind of file."""
    if path.name.endswith(PARQUET):
        import_library(path.name, "pyarrow", "simulation")
    return import_library(path.name, "pandas", "simulation")


def read_table(path: Path, label: str, as_text: Collection[str] = ()) -> Any:
    """Return a file as a data frame; the header alone tells how its columns are separated.

    Parameters
    ----------
    path : Path
    label : str
        Column that is read as text, in which no word stands for a missing value.
    as_text : collection of str
        Other columns that are to be read as text.
    """
    pandas = import_pandas(path)
    try:
        if path.name.endswith(PARQUET):
            return pandas.read_parquet(path).rename(columns=str)
        header, encoding = _header(path)
        names = pandas.read_csv(io.StringIO(header), sep=_separator(header), nrows=0).columns
        # A byte that means nothing must not make a party fail because of one record.
        return pandas.read_csv(
            path,
            sep=_separator(header),
            encoding=encoding,
            encoding_errors="replace",
            skipinitialspace=True,
            low_memory=False,
            dtype=dict.fromkeys({label, *as_text}, str),
            keep_default_na=False,
            na_values={name: list(MISSING) for name in names if name != label},
        )
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise InvalidData(f"{path.name}: the file must be a table, got {error}.") from error


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
