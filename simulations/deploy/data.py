"""Files that parties bring: archives of numbers, and tables.

What a file means is decided by the public file alone, which everybody holds. If it is an
archive (``.npz``), its rows are taken as they are, and so are all others. If it is a table
(``.csv``, ``.parquet``), columns are found by their names, turned into numbers by the
categories of the public rows and scaled by their mean and deviation.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, IntArray
from fl_strategies.core.party import check_rows
from fl_strategies.exceptions import InvalidData, require, require_data
from fl_strategies.runtime.atomic_files import PRIVATE
from simulations.files import encode_columns, public_scale, read_npz
from simulations.libraries import import_library

ARCHIVE: Final = ".npz"
TABLES: Final = (".csv", ".csv.gz", ".csv.xz", ".parquet")
LABEL: Final = "label"
"""Name of the label column unless another one is given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PublicData:
    """The rows that everybody holds, and the class list.

    Parameters
    ----------
    x : (num_rows, ...)
    y : (num_rows,), optional
        Class indices, if the file has labels.
    classes : tuple of str
        Names of the classes, sorted.
    table : data frame, optional
        The rows before they became numbers, where the file is a table.
    """

    x: Array
    y: IntArray | None
    classes: tuple[str, ...]
    table: Any = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.x.shape[1:]


def class_list(text: str) -> tuple[str, ...]:
    """Return the classes in the one order that all of the federation use.

    They are sorted, as numbers if all are whole numbers, so that it does not matter in
    which order somebody wrote them down.

    Examples
    --------
    >>> class_list("10, 9,2")
    ('2', '9', '10')
    """
    names = {name.strip() for name in text.split(",")} - {""}
    require(len(names) >= 2, "classes", "the list", "at least 2 names with commas", text)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int if whole else None))


def read_public(path: Path, classes: tuple[str, ...], label: str = LABEL) -> PublicData:
    """Read the public file; its labels are optional."""
    if _is_archive(path):
        arrays = read_npz(path, "x", optional=("y",))
        check_rows(path.name, "x", arrays["x"])
        y = class_indices(path.name, arrays["y"], classes) if "y" in arrays else None
        return PublicData(x=_with_rows(path, arrays["x"]), y=y, classes=classes)
    table = _read_table(path)
    labels = table.pop(label) if label in table.columns else None
    numbers = encode_columns(path.name, table, np.arange(len(table)))
    return PublicData(
        x=_with_rows(path, public_scale(numbers)(numbers)),
        y=None if labels is None else class_indices(path.name, labels.to_numpy(), classes),
        classes=classes,
        table=table,
    )


def read_labelled(path: Path, public: PublicData, label: str = LABEL) -> tuple[Array, IntArray]:
    """Return the rows of a file, in the form of the public ones, and their class indices."""
    if _is_archive(path):
        arrays = read_npz(path, "x", "y")
        x, labels = arrays["x"], arrays["y"]
        rule = "an archive or a table like the public file"
        require_data(public.table is None, path.name, "the file", rule, "an archive")
    else:
        table = _read_table(path)
        rule = f"{label!r}, or named by the setting label"
        found = f"columns {', '.join(map(str, table.columns[:20]))}"
        require_data(label in table.columns, path.name, "the label column", rule, found)
        labels = table.pop(label).to_numpy()
        x = _numbers(path.name, table, public)
    check_rows(path.name, "x", x)
    same = x.dtype == public.x.dtype
    require_data(same, path.name, "x", f"of {public.x.dtype} like public rows", x.dtype)
    y = class_indices(path.name, labels, public.classes)
    require_data(len(x) == len(y), path.name, "labels", f"{len(x)}, one a row", len(y))
    return x, y


def class_indices(owner: str, labels: Array, classes: tuple[str, ...]) -> IntArray:
    """Return the position of every label, a whole number or a text, in the class list.

    Examples
    --------
    >>> class_indices("pets.csv", np.array(["dog", "cat"]), ("cat", "dog"))
    array([1, 0])
    """
    labels = np.asarray(labels)
    require_data(labels.ndim == 1, owner, "labels", "one a row", f"shape {labels.shape}")
    if labels.dtype.kind == "f" and (labels == np.round(labels)).all():
        labels = labels.astype(np.int64)
    positions = {name: position for position, name in enumerate(classes)}
    indices = np.array([positions.get(str(name), -1) for name in labels], dtype=np.int64)
    num_unknown = int((indices < 0).sum())
    rule = f"in the class list {', '.join(classes[:20])}"
    require_data(not num_unknown, owner, "labels", rule, f"{num_unknown} others")
    return indices


def write_labelled(
    path: Path, x: Array, y: IntArray | None, classes: tuple[str, ...], label: str = LABEL
) -> None:
    """Write rows and the names of their classes in the format that the name ends in.

    A new file is for its owner only: most of them hold records.
    """
    path.touch(PRIVATE)
    names = None if y is None else np.array(classes)[y]
    if _is_archive(path):
        arrays = {"x": x} if names is None else {"x": x, "y": names}
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        return
    pandas = _import_pandas(path)
    flat = x.reshape(len(x), -1)
    frame = pandas.DataFrame(flat, columns=[f"x{i}" for i in range(flat.shape[1])])
    if names is not None:
        frame[label] = names
    if path.name.endswith(".parquet"):
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False)


def _is_archive(path: Path) -> bool:
    known = path.name.endswith((ARCHIVE, *TABLES))
    rule = f"one that ends in {', '.join((ARCHIVE, *TABLES))}"
    require(known, "data file", "the name", rule, path.name)
    return path.name.endswith(ARCHIVE)


def _with_rows(path: Path, x: Array) -> Array:
    require_data(len(x) > 0, path.name, "the file", "of at least one row", "none")
    return x


def _import_pandas(path: Path) -> ModuleType:
    """Import pandas, and make sure of what it needs for this kind of file."""
    if path.name.endswith(".parquet"):
        import_library(path.name, "pyarrow", "simulation")
    return import_library(path.name, "pandas", "simulation")


def _read_table(path: Path) -> Any:
    pandas = _import_pandas(path)
    try:
        if path.name.endswith(".parquet"):
            return pandas.read_parquet(path)
        return pandas.read_csv(path, skipinitialspace=True)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidData(f"{path.name}: the file must be a table, got {error}.") from error


def _numbers(owner: str, table: Any, public: PublicData) -> Array:
    if public.table is None:
        return _plain_numbers(owner, table, public)
    names = list(public.table.columns)
    lacking = sorted(set(map(str, names)) ^ set(map(str, table.columns)))
    require_data(not lacking, owner, "columns", "those of the public file", lacking[:10])
    pandas = import_library(owner, "pandas", "simulation")
    is_number = pandas.api.types.is_numeric_dtype
    for name in names:
        alike = is_number(table[name]) == is_number(public.table[name])
        rule = "numbers or text as in the public file"
        require_data(alike, owner, f"column {name!r}", rule, table[name].dtype)
    rows = np.arange(len(public.table))
    both = pandas.concat([public.table, table[names]], ignore_index=True)
    numbers = encode_columns(owner, both, rows)
    return public_scale(numbers[rows])(numbers[len(rows) :])


def _plain_numbers(owner: str, table: Any, public: PublicData) -> Array:
    """Return columns as they stand, in the order of the file."""
    width = math.prod(public.row_shape)
    fits = table.shape[1] == width
    require_data(fits, owner, "the table", f"{width} columns and a label", table.shape[1])
    try:
        numbers = table.to_numpy(dtype=public.x.dtype)
    except (TypeError, ValueError) as error:
        rule = "numbers, because the public file is an archive"
        raise InvalidData(f"{owner}: the columns must be {rule}, got text.") from error
    rows: Array = numbers.reshape(len(table), *public.row_shape)
    return rows
