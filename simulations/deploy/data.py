"""Files that parties bring: archives of numbers, and tables.

What a file means is decided by the public file alone, which everybody holds. If it is an
archive (``.npz``), its rows are taken as they are, and so are all others. If it is a table
(``.csv``, ``.parquet``), columns are found by their names and become numbers as its rows say
(see `simulations.data.tables`), in simulations and deployments alike. A schema decides instead
where there is one, and then no public file is needed.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from fl_strategies._util import PRIVATE, Array, FloatArray, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.learners import Task
from fl_strategies.party.party import RecordForm, check_rows
from simulations.data.encoded import EncodedFile, Encoding
from simulations.data.files import read_npz
from simulations.data.schema import Schema
from simulations.data.tables import (
    MISSING,
    TABLES,
    UNLABELLED,
    TableEncoder,
    dropped,
    import_pandas,
    label_texts,
    listed,
    names_in,
    numbers,
    only_texts,
    read_table,
    require_label,
)
from simulations.data.targets import LabelKind, Targets, is_empty

logger = logging.getLogger("flwr.fl_strategies")

ARCHIVE: Final = ".npz"
LABEL: Final = "label"
"""Name of the label column unless another one is given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PublicData:
    """The rows that everybody holds, and the class list."""

    x: Array
    y: Array | None
    """Class indices, or numeric targets (n, 1), if all rows of the file have labels."""
    classes: tuple[str, ...]
    """The class list, or the name of the numeric target."""
    encoder: TableEncoder | None = None
    """Encoder of tables, where the file is one."""
    drop: str = ""
    """Columns that nobody uses, with commas between them."""
    encoded: EncodedFile | None = None
    """What makes rows of raw records, where a frozen encoder does."""
    schema: Schema | None = None
    """Declared columns of tables, where a schema says what they mean."""
    targets: Targets | None = None
    """How numeric targets are read; None for classes."""

    @property
    def task(self) -> Task:
        """What labels are."""
        return "single-label" if self.targets is None else "regression"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.x.shape[1:]

    @property
    def encoding(self) -> str:
        """Hash of what makes rows of raw records, or of the schema; none if empty."""
        if self.schema is not None:
            return self.schema.hash
        return self.encoded.encoding.hash if self.encoded else ""

    def describe(self) -> list[str]:
        """Say what was made of columns or records, one line a kind."""
        if self.encoded is not None:
            return [self.encoded.encoding.describe(self.x.shape[1])]
        if self.schema is not None:
            return self.schema.describe()
        return self.encoder.describe() if self.encoder else []

    @property
    def common_class(self) -> int:
        """Most frequent class of the public rows; the first one if these have no labels."""
        return 0 if self.y is None else int(np.bincount(self.y).argmax())


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


def check_classes(owner: str, settings: Mapping[str, Any]) -> None:
    """Raise `InvalidParameter` unless either classes are listed, or labels are numbers."""
    kinds, task, classes = get_args(LabelKind), settings["task"], settings["classes"]
    require(task in kinds, owner, "task", f"one of {', '.join(kinds)}", task)
    if settings["schema"]:
        return
    rule = 'given, unless task is "numbers"'
    require(bool(classes) or task == "numbers", owner, "classes", rule, classes)
    rule = 'omitted where task is "numbers"'
    require(not classes or task != "numbers", owner, "classes", rule, classes)


def read_public(
    path: Path,
    classes: tuple[str, ...],
    label: str = LABEL,
    drop: str = "",
    encoding: Encoding | None = None,
    *,
    numbers: bool = False,
) -> PublicData:
    """Read the public file; its labels are optional, and so are columns in `drop`.

    With an encoding its records are images or texts: in an archive, or the one column of a
    table. With `numbers` labels are numbers, and the class list is empty.
    """
    targets = Targets(label=label) if numbers else None
    if _is_archive(path):
        arrays = read_npz(path, "x", optional=("y",))
        if encoding is not None:
            known = _known_labels(path, arrays.get("y"), classes, targets)
            return _encoded(path, arrays["x"], drop, encoding, known)
        check_rows(path.name, "x", arrays["x"])
        known = _known_labels(path, arrays.get("y"), classes, targets)
        return PublicData(x=_with_rows(path, arrays["x"]), drop=drop, **known)
    table = _with_rows(path, read_table(path))
    labels = label_texts(table.pop(label)) if label in table.columns else None
    if encoding is not None:
        records = only_texts(path.name, _without(path.name, table, drop))
        known = _known_labels(path, labels, classes, targets)
        return _encoded(path, records, drop, encoding, known)
    encoder = TableEncoder.learn(path.name, table, names_in(drop))
    return PublicData(
        x=encoder.encode(path.name, table),
        encoder=encoder,
        drop=drop,
        **_known_labels(path, labels, classes, targets),
    )


def declared(
    path: Path | None, schema: Schema, classes: tuple[str, ...] = (), drop: str = ""
) -> PublicData:
    """Read the public file, if there is one, as a schema declares; it names the classes too."""
    owner, known = "schema", schema.label.classes
    same = not classes or {*classes} == {*known}
    require(same, owner, "classes", f"omitted, or the schema's {listed(known)}", classes)
    require(not drop, owner, "drop", "omitted with a schema, which lists the columns", drop)
    if path is None:
        none = np.empty((0, schema.width), dtype=np.float32)
        named = known or (schema.label.name,)
        return PublicData(x=none, y=None, classes=named, schema=schema, targets=schema.targets)
    require_data(
        not _is_archive(path), path.name, "the file", "a table with a schema", path.name
    )
    table = _with_rows(path, read_table(path))
    name = schema.label.name
    labels = label_texts(table.pop(name)) if name in table.columns else None
    return PublicData(
        x=schema.encode(table, path.name),
        schema=schema,
        **_known_labels(path, labels, known, schema.targets),
    )


def _encoded(
    path: Path,
    records: Array,
    drop: str,
    encoding: Encoding,
    known: Mapping[str, Any],
) -> PublicData:
    learned = EncodedFile.learn(path, _with_rows(path, records), encoding)
    return PublicData(x=learned.rows, drop=drop, encoded=learned, **known)


def _known_labels(
    path: Path, labels: Array | None, classes: tuple[str, ...], targets: Targets | None
) -> dict[str, Any]:
    """Return what public labels are, their names, and how other numeric ones are read."""
    if targets is None:
        return {"y": _public_labels(path.name, labels, classes), "classes": classes}
    y = None
    if labels is not None:
        cells = _column(path.name, labels)
        if targets.low == targets.high and not is_empty(cells).all():
            targets = Targets.learn(path.name, targets.label, cells)
        y = targets.read(path.name, cells)
        y = None if np.isnan(y).any() else y
    return {"y": y, "classes": (targets.label,), "targets": targets}


def _column(owner: str, labels: Array) -> Array:
    """Return numeric targets as one column."""
    flat = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    require_data(flat.ndim == 1, owner, "labels", "one per row", f"shape {labels.shape}")
    return flat


def _without(owner: str, table: Any, drop: str) -> Any:
    """Return a table without the columns that nobody uses."""
    names = [str(name) for name in table.columns]
    unused = dropped(owner, drop, names)
    return table.drop(columns=[name for name in names if name in unused])


def read_labelled(
    path: Path, public: PublicData, label: str = LABEL, *, strict: bool = False
) -> tuple[Array, Array]:
    """Return the rows of a file, in the form of the public ones, and their labels.

    A value that is no number becomes the public median, a numeric target as well, and a label
    beyond the class list the commonest public class, or the first one. Rows without a label
    are dropped: they are no records. How many there are stands in the reader's own log and
    nowhere else.

    Parameters
    ----------
    path : Path
    public : PublicData
    label : str
        Column of a table that holds the class.
    strict : bool (default: False)
        Refuse labels beyond the class list or that are no numbers, where the file is not a
        party's.
    """
    if _is_archive(path):
        arrays = read_npz(path, "x", "y")
        rule = "a table, as the public file is or the schema declares"
        plain = public.encoder is None and public.schema is None
        require_data(plain, path.name, "the file", rule, "an archive")
        labels, x = arrays["y"], arrays["x"]
        if public.encoded is not None:
            x = public.encoded.encode(path, x)
        x = RecordForm(public.x, others="public rows").read(path.name, "x", x)
    else:
        table = read_table(path)
        require_label(path.name, label, [str(name) for name in table.columns])
        labels = label_texts(table.pop(label))
        x = _numbers(path, table, public)
    y: Array
    if public.targets is not None:
        y = _targets(path.name, _column(path.name, labels), public.targets, strict=strict)
        labelled = ~np.isnan(y[:, 0])
    else:
        default = None if strict else public.common_class
        y = class_indices(path.name, labels, public.classes, default)
        labelled = y != UNLABELLED
    require_data(len(x) == len(y), path.name, "labels", f"{len(x)}, one per row", len(y))
    if labelled.all():
        return x, y
    logger.warning("%s: %d rows without a label are dropped.", path.name, (~labelled).sum())
    return x[labelled], y[labelled]


def read_rows(path: Path, public: PublicData, label: str = LABEL) -> Array:
    """Return all rows of a table in the form of the public ones, for a model to predict.

    The table needs no labels; if it has some, nobody looks at them.
    """
    table = read_table(path)
    return _numbers(path, table.drop(columns=label, errors="ignore"), public)


def _targets(owner: str, cells: Array, targets: Targets, *, strict: bool) -> FloatArray:
    """Return numeric targets; labels of which none is a number are refused in any case."""
    others = np.isnan(targets.numbers(cells)) & ~is_empty(cells)
    accepted = not others.any() or (not strict and not others.all())
    require_data(accepted, owner, "labels", "numbers", f"{others.sum()} others")
    return targets.read(owner, cells)


def _public_labels(
    owner: str, labels: Array | None, classes: tuple[str, ...]
) -> IntArray | None:
    """Return class indices of public rows, or None unless all rows have labels."""
    if labels is None:
        return None
    y = class_indices(owner, labels, classes)
    missing = int((y == UNLABELLED).sum())
    if not missing:
        return y
    logger.info("%s: %d rows have no label, so no label of them is used.", owner, missing)
    return None


def class_indices(
    owner: str, labels: Array, classes: tuple[str, ...], default: int | None = None
) -> IntArray:
    """Return the position of every label, a whole number or a text, in the class list.

    A label is missing, and has `UNLABELLED` instead, if it is empty, or a word such as NA
    that the class list has not. Any other becomes the default, or is refused without one;
    labels of which none is a class are refused in any case.

    Examples
    --------
    >>> class_indices("pets.csv", np.array(["dog", "cat"]), ("cat", "dog"))
    array([1, 0])
    >>> class_indices("pets.csv", np.array(["dog", "", "bird"]), ("cat", "dog"), default=0)
    array([ 1, -1,  0])
    """
    labels = np.asarray(labels)
    require_data(labels.ndim == 1, owner, "labels", "one per row", f"shape {labels.shape}")
    positions = {name: position for position, name in enumerate(classes)}
    plain = labels.astype(np.str_) if labels.dtype.kind == "S" else labels
    known = {**dict.fromkeys(MISSING, UNLABELLED), **positions}
    words = [_word(label) for label in plain.tolist()]
    found = {word: known.get(_class_name(word, positions)) for word in {*words}}
    num_unknown = sum(found[word] is None for word in words)
    rule = f"in the class list {', '.join(classes[:20])}"
    accepted = not num_unknown or (default is not None and num_unknown < len(words))
    require_data(accepted, owner, "labels", rule, f"{num_unknown} others")
    if num_unknown:
        logger.warning(
            "%s: %d labels are not %s, and count as %s.",
            owner,
            num_unknown,
            rule,
            classes[default or 0],
        )
    read = {word: default if place is None else place for word, place in found.items()}
    return np.array([read[word] for word in words], dtype=np.int64)


def _word(label: Any) -> str:
    """Return a label as a text; whole numbers have no decimal point."""
    whole = isinstance(label, float) and label.is_integer()
    return str(int(label) if whole else label).strip()


def write_labelled(
    path: Path, x: Array, y: Array | None, classes: tuple[str, ...], label: str = LABEL
) -> None:
    """Write rows and the names of their classes, or numbers, as the name's ending says.

    A new file is for its owner only: most of them hold records.
    """
    path.touch(PRIVATE)
    names = y
    if y is not None:
        names = y[:, 0] if y.dtype.kind == "f" else np.array(classes)[y]
    if _is_archive(path):
        arrays = {"x": x} if names is None else {"x": x, "y": names}
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        return
    pandas = import_pandas(path)
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


def _class_name(name: str, known: Mapping[str, int]) -> str:
    """Return how the class list writes a label: as a whole number, or in other letters."""
    if name not in known and name.endswith(".0"):
        name = name.removesuffix(".0")
    same = [other for other in known if other.lower() == name.lower()]
    return same[0] if name not in known and len(same) == 1 else name


def _with_rows(path: Path, x: Any) -> Any:
    require_data(len(x) > 0, path.name, "the file", "of at least one row", "none")
    return x


def _numbers(path: Path, table: Any, public: PublicData) -> Array:
    """Return the rows of a table in the form of the public ones."""
    owner = path.name
    if public.encoded is not None:
        records = only_texts(owner, _without(owner, table, public.drop))
        rows = public.encoded.encode(path, records)
        return RecordForm(public.x, others="public rows").read(owner, "the texts", rows)
    if public.schema is not None:
        return public.schema.encode(table, owner)
    names = [str(name) for name in table.columns]
    encoder = public.encoder
    known = [column.name for column in encoder.columns] if encoder else []
    unused = [*encoder.dropped] if encoder else []
    ignored = dropped(owner, public.drop, [*names, *known, *unused])
    table = table.drop(columns=[name for name in ignored if name in names])
    if encoder is not None:
        given = {*map(str, table.columns)} - {*unused}
        missing, more = sorted({*known} - given), sorted(given - {*known})
        found = [f"without {listed(missing)}"] if missing else []
        hint = "(the setting drop names columns to ignore)"
        found += [f"with {listed(more)} {hint}"] if more else []
        rule = "those of the public file"
        require_data(not found, owner, "the columns", rule, f"a table {' and '.join(found)}")
        return encoder.encode(owner, table)
    width = math.prod(public.row_shape)
    fits = table.shape[1] == width
    require_data(fits, owner, "the table", f"{width} columns and a label", table.shape[1])
    columns = [numbers(table.iloc[:, place], comma=False) for place in range(width)]
    rows = np.stack(columns, axis=1).reshape(len(table), *public.row_shape)
    return RecordForm(public.x, others="public rows").read(owner, "the columns", rows)
