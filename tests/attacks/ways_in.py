"""Every way into a party, for records of any cells, and how to replace one of them.

A way takes records and labels as a program or a person has them, goes through the product's
own reader, and returns what the party trains on. Replacing one record must change one row
of that and nothing else: what becomes of a record is a function of it and of public facts.
"""

import csv
import datetime
import decimal
import gzip
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from flwr.app import Context, RecordDict

from clients.app import party_loader
from fl_strategies import Party
from fl_strategies._util import Array
from simulations.data.schema import Schema
from simulations.data.sets import Request, load_dataset
from simulations.deploy.data import declared, read_labelled, read_public
from tests.attacks.interference import NUM_CLASSES, PUBLIC, WIDTH

NUM_RECORDS = 10
CLASSES = ("0", "1", "2")
NAMES = ("mean", "area", "width")
Rng = np.random.Generator
Rows = list[Any]
Labels = list[Any]


class Encoded(NamedTuple):
    """What a party trains on."""

    x: Array
    y: Array


Encode = Callable[[Rows, Labels], Encoded]


def differing(first: Encoded, second: Encoded) -> list[int] | str:
    """Return the rows that differ, or what else does."""
    for one, other in zip(first, second, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{one.shape} {one.dtype} and {other.shape} {other.dtype}"
        if not np.isfinite(other).all():
            return "values that are not finite"
    rows, both = range(len(first.x)), list(zip(first, second, strict=True))
    return [
        row
        for row in rows
        if any(one[row].tobytes() != other[row].tobytes() for one, other in both)
    ]


def interference(encode: Encode, rows: Rows, labels: Labels, others: Sequence[Any]) -> str:
    """Replace the last record by each of others in turn; describe what else changes, or "".

    An error of a reader counts: whether a party answers must not depend on a record.
    """
    try:
        first = encode(rows, labels)
        for row, label in others:
            found = differing(first, encode([*rows[:-1], row], [*labels[:-1], label]))
            if found not in ([], [len(first.x) - 1]):
                return f"{row!r:.200} with label {label!r:.50}: {found}"
    except Exception as error:
        return f"an error: {error!r}"
    return ""


# Cells that programs have

EXTREME: Sequence[Any] = (
    *(1e39, -3e37, 1.7e308, 5e-324, -0.0, math.nan, math.inf, -math.inf, 0.5),
    *(2**53 + 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**400, -(10**400), True, False),
)
TEXTS: Sequence[Any] = ("about 4", "3,5", "1.234", "", "NA", "7", "nan", "1e999", "ü")
OBJECTS: Sequence[Any] = (
    None,
    pd.NA,
    decimal.Decimal("1e400"),
    datetime.date(2024, 1, 1),
    pd.Timestamp("2024-01-01"),
    pd.NaT,
    np.float32(0.1),
    np.uint64(2**64 - 1),
    b"5",
)
WRONG_SHAPES: Sequence[Any] = ([1.0], [1.0] * 4, [], 5.0, None, "abc", [[1.0, 2.0, 3.0]])
LABELS: Sequence[Any] = (0, 1, 2, 1.0, "1", True)
ODD_LABELS: Sequence[Any] = (0.5, -1, 99, 10**30, math.inf, "sick", b"1", None, math.nan, pd.NA)


def plain_row(rng: Rng, whole: bool | None = None) -> list[Any]:
    """Return numbers, whole ones or fractions, some of them beyond the public bound."""
    if rng.random() < 0.5 if whole is None else whole:
        return [int(cell) for cell in rng.integers(-200, 200, WIDTH)]
    return (rng.normal(size=WIDTH) * 10.0 ** rng.integers(-2, 4)).tolist()


def odd_row(rng: Rng, cells: Sequence[Any]) -> list[Any]:
    """Return numbers, of which some are other cells."""
    row = plain_row(rng)
    for place in range(WIDTH):
        if rng.random() < 0.6:
            row[place] = cells[rng.integers(len(cells))]
    return row


def pick(rng: Rng, cells: Sequence[Any]) -> Any:
    return cells[rng.integers(len(cells))]


# Ways into `Party`


def _learner() -> Any:
    raise AssertionError("nothing is trained")


def through_party(x: Any, y: Any, **options: Any) -> Encoded:
    """Return the records of a party, read as its own and as held out."""
    given = {"public": PUBLIC.x, "num_classes": NUM_CLASSES, "learner_fn": _learner}
    party = Party(x=x, y=y, x_test=x, y_test=y, **{**given, **options})
    own, held_out = Encoded(party.x, party.y), Encoded(party.x_test, party.y_test)  # type: ignore[arg-type]
    assert differing(own, own) == differing(own, held_out), "held-out rows are read otherwise"
    return own


def inferred(rows: Rows) -> Array:
    """Return what `numpy.array` makes of rows, in whatever type."""
    try:
        return np.array(rows)
    except (ValueError, TypeError, OverflowError):
        return np.array(rows, dtype=object)


def _objects(rows: Rows) -> Array:
    array = np.empty((len(rows), WIDTH), dtype=object)
    for place, row in enumerate(rows):
        array[place] = row
    return array


def _masked(rows: Rows) -> Any:
    cells = np.array([[float(cell) for cell in row] for row in rows])
    return np.ma.masked_invalid(cells)


def _frame(rows: Rows) -> Any:
    return pd.DataFrame(rows, columns=list(NAMES))


PUBLIC_FRAME = _frame(PUBLIC.x.tolist())


def _dealt(rows: Any, labels: Any, **options: Any) -> Encoded:
    """Return the records of a party that a function deals out."""
    given = {"public": PUBLIC.x, "num_classes": NUM_CLASSES, "learner_fn": _learner}
    load = party_loader(lambda *_: (rows, rows, labels, labels), **{**given, **options})
    party = load(_node())
    return Encoded(party.x, party.y)


def _node() -> Context:
    return Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})


class Items:
    """A data set as torch knows them: an item a record."""

    def __init__(self, rows: Rows, labels: Labels) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.rows[place], self.labels[place]


def _items(rows: Rows, labels: Labels) -> Encoded:
    given = {"public": PUBLIC.x, "num_classes": NUM_CLASSES, "learner_fn": _learner}
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    both = Items(tensors, labels), Items(tensors, labels)
    party = party_loader(lambda *_: both, **given)(_node())
    return Encoded(party.x, party.y)


FLOATS = [cell for cell in EXTREME if isinstance(cell, float) or abs(cell) < 2**100]
"""Cells that a float64 has."""


UNSIGNED = [cell for cell in FLOATS if cell or math.copysign(1, cell) > 0]
"""Without -0.0, which pandas stores as the zero that it met first."""


class Way(NamedTuple):
    """A way in, and the cells that one can write there."""

    encode: Encode
    cells: Sequence[Any] = (*EXTREME, *TEXTS, *OBJECTS)
    labels: Sequence[Any] = (*LABELS, *ODD_LABELS)
    shapes: Sequence[Any] = ()
    """Records of other shapes."""

    def record(self, rng: Rng) -> tuple[Any, Any]:
        """Return any record and any label."""
        if self.shapes and rng.random() < 0.2:
            return pick(rng, self.shapes), pick(rng, self.labels)
        return odd_row(rng, self.cells), pick(rng, self.labels)

    def table(self, rng: Rng) -> tuple[Rows, Labels]:
        """Return records of which the first two are valid, and all in every other table.

        A table is of whole numbers, of fractions or of both.
        """
        share, whole = pick(rng, (0.0, 0.5)), pick(rng, (True, False, None))
        odd = [False, False, *(rng.random() < share for _ in range(NUM_RECORDS))]
        rows = [self.record(rng)[0] if is_odd else plain_row(rng, whole) for is_odd in odd]
        labels = [pick(rng, self.labels if is_odd else self.labels[:2]) for is_odd in odd]
        return rows, labels


LABELLED = (*LABELS, *ODD_LABELS[:7])
"""Labels of which none is missing: rows without one are no records where rows are dealt."""
NO_COMPLEX = (*EXTREME, *TEXTS, *OBJECTS)
PARTY_WAYS: Mapping[str, Way] = {
    "list": Way(through_party, shapes=WRONG_SHAPES, cells=(*NO_COMPLEX, 1j, 2 + 0j, [1, 2])),
    "tuple": Way(lambda x, y: through_party(tuple(map(_tupled, x)), tuple(y)), shapes=([1.0],)),
    "list of arrays": Way(
        lambda x, y: through_party([np.array(row) for row in x], y), shapes=([1.0], 5.0, [])
    ),
    "list without public rows": Way(lambda x, y: through_party(x, y, public=None)),
    "object array": Way(lambda x, y: through_party(_objects(x), y), cells=(*NO_COMPLEX, 1j)),
    "array by inference": Way(
        lambda x, y: through_party(inferred(x), inferred(y)), shapes=([1.0], 5.0, [])
    ),
    "array by inference without public rows": Way(
        lambda x, y: through_party(inferred(x), y, public=None)
    ),
    "masked array": Way(lambda x, y: through_party(_masked(x), y), cells=FLOATS),
    "sparse array": Way(
        lambda x, y: through_party(scipy.sparse.csr_array(np.array(x, dtype=np.float64)), y),
        cells=FLOATS,
    ),
    "frame": Way(lambda x, y: through_party(_frame(x), pd.Series(y))),
    "frame of public names": Way(
        lambda x, y: through_party(_frame(x)[["area", "width", "mean"]], y, public=PUBLIC_FRAME)
    ),
    "frame without public rows": Way(lambda x, y: through_party(_frame(x), y, public=None)),
    "frame and whole public numbers": Way(
        lambda x, y: through_party(_frame(x), y, public=np.rint(PUBLIC.x).astype(np.int64))
    ),
    "frame of nullable types": Way(
        lambda x, y: through_party(_frame(x).convert_dtypes(), pd.Series(y).convert_dtypes()),
        cells=(*EXTREME[:10], *TEXTS, None, pd.NA),
        labels=(0, 1, 2, None, pd.NA, 99),
    ),
    "frame of categories": Way(
        lambda x, y: through_party(
            _frame(x).astype("category"), pd.Series(y, dtype="category")
        ),
        cells=(*UNSIGNED, *TEXTS, *OBJECTS[:6]),
    ),
    "sparse frame": Way(
        lambda x, y: through_party(_frame(x).astype(pd.SparseDtype(np.float64, 0)), y),
        cells=UNSIGNED,
    ),
    "dealt lists": Way(_dealt, shapes=WRONG_SHAPES[:3], labels=LABELLED),
    "dealt frames": Way(
        lambda x, y: _dealt(_frame(x), pd.Series(y, dtype=object)), labels=LABELLED
    ),
    "dealt data set of torch": Way(
        _items, cells=FLOATS, shapes=([1.0], [1.0] * 4), labels=LABELLED
    ),
    "names of classes": Way(
        lambda x, y: through_party(x, y, classes=["healthy", "ill", "1"]),
        labels=("healthy", "ill", "1", *ODD_LABELS, True, 2),
    ),
    "truth values of classes": Way(
        lambda x, y: through_party(x, y, classes=["True", "False"], num_classes=2),
        labels=(True, False, "True", 1, 0, *ODD_LABELS),
    ),
    "numbers of classes": Way(
        lambda x, y: through_party(x, inferred(y), classes=["7", "1", "0"]),
        labels=(7, 1, 0, 7.0, 0.5, "7", *ODD_LABELS),
    ),
}


def _tupled(row: Any) -> Any:
    return tuple(row) if isinstance(row, list) else row


def regression(rows: Rows, labels: Labels) -> Encoded:
    """Return records whose targets are numbers, two a record."""
    targets = [[row[0], label] for row, label in zip(rows, labels, strict=True)]
    return through_party(rows, targets, task="regression", num_classes=2)


def multi_label(rows: Rows, labels: Labels) -> Encoded:
    """Return records with two labels each."""
    marks = [[1, label] for label in labels]
    return through_party(rows, marks, task="multi-label", num_classes=2)


PARTY_WAYS = {
    **PARTY_WAYS,
    "regression": Way(regression, labels=(*LABELS, *ODD_LABELS, 1e308)),
    "multi-label": Way(multi_label),
}

# Arrays and tensors of a declared type: a record is then of that type, too.

DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("float16", "float32", "float64", "longdouble", "complex128", ">f4", ">i8"),
    *("U8", "S8", "datetime64[ns]", "O"),
)
TORCH_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "bool"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)


def typed_rows(rng: Rng, dtype: np.dtype[Any], number: int) -> Array:
    """Return rows of any bit pattern of a type of numbers, or of numbers as texts."""
    if dtype.kind in "iufc":
        size = number * WIDTH * dtype.itemsize
        wild = np.frombuffer(rng.bytes(size), dtype=dtype).reshape(number, WIDTH)
        small = rng.integers(0, 100, size=(number, WIDTH)).astype(dtype)
        return np.where(rng.random((number, WIDTH)) < 0.3, wild, small)
    numbers = rng.integers(0, 100, size=(number, WIDTH))
    if dtype.kind in "US":
        texts = np.array(["about 4", "", "1e99", "nan"])
        return np.where(rng.random(numbers.shape) < 0.2, texts[numbers % 4], numbers).astype(
            dtype
        )
    return (numbers % 2 == 0 if dtype.kind == "b" else numbers).astype(dtype)


# Tables in files

COLUMNS = ("age", "dose", "seen", "town", "score")
PUBLIC_TABLE = [
    [str(20 + 3 * n), f"{n},{n % 7}5", f"20{10 + n}-0{1 + n % 9}-1{n % 10}", town, score]
    for n, (town, score) in enumerate(
        zip(["Ulm", "Bonn", "Kiel"] * 5, ["1.5", "", "2.25"] * 5, strict=True)
    )
]
"""Numbers, decimal commas, dates, words, and numbers with gaps."""
TABLE_TEXTS = (
    *("", "NA", "?", "3,5", "3.5", "1.234", "1,234", "about 4", "1e400", "3e37", "-1.7e308"),
    *("5e-324", "inf", "-inf", "nan", "99999999999999999999", "9007199254740993", "True"),
    "12 %",
    *("2024-01-01T00:00:00.123456789", "1500-01-01", "9999-12-31", "0001-01-01T00:00:00+14:00"),
    *("2024-02-30", "Ulm", "ulm", "Köln", "a,b", 'say "x"', "two\nlines", "nul\0", "1_000"),
)
FILE_LABELS = ("0", "1", "2", "1.0", "sick", "0.5", "99", "1e30", 'odd "one"')


SCHEMA: Mapping[str, Any] = {
    "label": {"name": "label", "classes": [*CLASSES]},
    "columns": {
        "age": {"type": "number", "least": 18, "most": 70, "cuts": [30, 50]},
        "dose": {"type": "number", "least": 0, "most": 20, "comma": True, "log": True},
        "seen": {"type": "date", "least": "2010-01-01", "most": "2030-12-31"},
        "town": {"type": "category", "values": ["Bonn", "Kiel", "Ulm"]},
        "score": {"type": "number", "least": -5, "most": 5},
    },
}
"""The same columns, declared."""
COLUMN_TEXTS: Mapping[str, Sequence[str]] = {
    "age": ("3,5", "about 4", "1,234", "1e400", ""),
    "dose": ("3,5", "1.234", "1.5", "about 4", "2.625"),
    "seen": (*TABLE_TEXTS[19:24], "2024-01-01"),
    "town": ("Ulm", "Köln", "", "5", "True"),
    "score": ("", "1.5", "NA", "x", "1.234"),
}
"""Texts that are odd in one column and mean something in another."""


def table_row(rng: Rng, share: float = 0.5) -> list[str]:
    """Return cells that fit the public columns, and a share of other ones."""
    row = list(pick(rng, PUBLIC_TABLE))
    for place, name in enumerate(COLUMNS):
        if rng.random() < share:
            row[place] = pick(rng, pick(rng, (TABLE_TEXTS, COLUMN_TEXTS[name])))
    return row


def clean_row(rng: Rng) -> list[str]:
    """Return cells of which a column has one type, also where public rows have another."""
    number = rng.integers(1, 9)
    texts = f"{20 + number} {number}.{number}25 1{number}00-01-01 Ulm {number}.5"
    return texts.split()


def write_csv(path: Path, rows: Sequence[Sequence[str]], labels: Sequence[str]) -> None:
    """Write a table as Python does; a row that is one text is written as it stands."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, "label"])
        for row, label in zip(rows, labels, strict=True):
            if isinstance(row, str):
                file.write(f"{row}\n")
            else:
                writer.writerow([*row, label])


class Files:
    """The ways in that are files, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_csv(folder / "public.csv", PUBLIC_TABLE, ["0", "1", "1"] * 5)
        self.table = read_public(folder / "public.csv", CLASSES)
        np.savez(folder / "public.npz", x=PUBLIC.x, y=PUBLIC.y)
        self.archive = read_public(folder / "public.npz", CLASSES)
        np.savez(folder / "public32.npz", x=PUBLIC.x.astype(np.float32))
        self.narrow = read_public(folder / "public32.npz", CLASSES)
        self.declared = declared(None, Schema.of(SCHEMA))

    def csv(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a table beside a public one."""
        write_csv(self.folder / "mine.csv", rows, labels)
        return Encoded(*read_labelled(self.folder / "mine.csv", self.table))

    def csv_gz(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a compressed table."""
        write_csv(self.folder / "mine.csv.gz", rows, labels)
        return Encoded(*read_labelled(self.folder / "mine.csv.gz", self.table))

    def csv_of_archive(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a table of plain numbers beside a public archive."""
        path = self.folder / "plain.csv"
        lines = [
            ",".join([*map(str, row), label]) for row, label in zip(rows, labels, strict=True)
        ]
        path.write_text("\n".join([",".join([*NAMES, "label"]), *lines, ""]))
        return self._through_party(path, self.archive)

    def declared_csv(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a table that a schema declares, without public rows."""
        write_csv(self.folder / "mine.csv", rows, labels)
        x, y = read_labelled(self.folder / "mine.csv", self.declared)
        return through_party(x, y, public=self.declared.x)

    def parquet(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a table of texts."""
        path = self.folder / "mine.parquet"
        frame = pd.DataFrame([[*row, label] for row, label in zip(rows, labels, strict=True)])
        frame.columns = [*COLUMNS, "label"]
        frame.astype(str).to_parquet(path)
        return Encoded(*read_labelled(path, self.table))

    def typed_parquet(self, rows: Rows, labels: Labels) -> Encoded:
        """Return columns of numbers, in the type that one odd cell gives them all."""
        path = self.folder / "typed.parquet"
        frame = pd.DataFrame(rows, columns=list(NAMES)).assign(label=pd.Series(labels))
        for name in frame.columns:
            try:
                frame[[name]].to_parquet(path)
            except (ValueError, TypeError, OverflowError):  # of several types
                frame[name] = [None if pd.isna(cell) else str(cell) for cell in frame[name]]
        frame.to_parquet(path)
        return self._through_party(path, self.archive)

    def npz(self, rows: Rows, labels: Labels) -> Encoded:
        """Return an archive of the type that numpy gives all of it."""
        np.savez(self.folder / "mine.npz", x=np.array(rows), y=np.array(labels))
        return self._through_party(self.folder / "mine.npz", self.archive)

    def npz_of_float32(self, rows: Rows, labels: Labels) -> Encoded:
        """Return one beside public rows of float32."""
        np.savez(self.folder / "mine.npz", x=np.array(rows), y=np.array(labels))
        return self._through_party(self.folder / "mine.npz", self.narrow)

    def _through_party(self, path: Path, public: Any) -> Encoded:
        x, y = read_labelled(path, public)
        return through_party(x, y, public=public.x)

    # Simulations: a file holds the public rows as well, and labels are of the class list.

    def simulated_npz(self, rows: Rows, labels: Labels) -> Encoded:
        """Return an archive with private, public and test rows."""
        del labels
        y = np.arange(len(rows)) % NUM_CLASSES
        arrays = {"x_train": np.array(rows), "y_train": y, "x_test": PUBLIC.x[:4]}
        path = self.folder / "all.npz"
        np.savez(path, **arrays, y_test=PUBLIC.y[:4], x_public=PUBLIC.x)
        data = load_dataset(str(path), Request(rng=np.random.RandomState(0)))
        return through_party(data.x_train, data.y_train, public=data.x_public)

    def simulated_images(self, rows: Rows, labels: Labels) -> Encoded:
        """Return an archive of pictures of one line."""
        del labels
        y = np.arange(len(rows)) % NUM_CLASSES
        arrays = {"x_train": np.array(rows)[:, None], "y_train": y}
        path = self.folder / "images.npz"
        test = {"x_test": PUBLIC.x[:4, None], "y_test": PUBLIC.y[:4]}
        np.savez(path, **arrays, **test, x_public=PUBLIC.x[:, None])
        data = load_dataset(str(path), Request(rng=np.random.RandomState(0)))
        return through_party(data.x_train, data.y_train, public=data.x_public)

    def simulated_csv(self, rows: Rows, labels: Labels) -> Encoded:
        """Return a table that is split, the replaced row into private ones."""
        del labels
        # A quarter of the rows is held out, and comes first.
        path, total = self.folder / "all.csv", 40
        order = np.random.RandomState(0).permutation(total)
        public = PUBLIC_TABLE * 3
        lines = [[*public[n], CLASSES[n % 3]] for n in range(total)]
        for place, row in zip(order[-len(rows) :], rows, strict=True):
            lines[place] = [*row, lines[place][-1]]
        write_csv(path, [line[:-1] for line in lines], [line[-1] for line in lines])
        data = load_dataset(str(path), Request(rng=np.random.RandomState(0), label="label"))
        return through_party(data.x_train, data.y_train, public=data.x_public)


ODD_LINES = ("1,2,3,4,5,6,7,8", "1", '20,"unclosed', "x" * 200_000, '"', ",,,,,1")
"""Lines of too many or too few cells, of an open quote, or longer than Python likes."""
