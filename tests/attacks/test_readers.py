"""What becomes of a record is a function of it and of public facts, in every way in."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fl_strategies._util import Array, to_array
from fl_strategies.party import party as party_module
from fl_strategies.party.party import RecordForm
from simulations.data import files
from simulations.data import tables as table_cells
from simulations.deploy import data
from tests.attacks.interference import NUM_CLASSES, PUBLIC
from tests.attacks.ways_in import (
    DTYPES,
    FILE_LABELS,
    FLOATS,
    NUM_RECORDS,
    ODD_LINES,
    PARTY_WAYS,
    TEXTS,
    TORCH_DTYPES,
    Encoded,
    Files,
    clean_row,
    differing,
    interference,
    odd_row,
    pick,
    plain_row,
    table_row,
    through_party,
    typed_rows,
)

TABLES, REPLACED = 17, 16
"""Random tables of a way into `Party`, and replacements in each."""
TYPED = 100
FILE_TABLES, FILE_REPLACED = 6, 12
FILE_WAYS = (
    *("csv", "declared_csv", "csv_gz", "csv_of_archive", "parquet", "typed_parquet"),
    *("npz", "npz_of_float32"),
    *("simulated_npz", "simulated_images", "simulated_csv"),
)
TABLE_WAYS = ("csv", "declared_csv", "csv_gz", "parquet", "simulated_csv")


def test_ten_thousand_records_are_replaced() -> None:
    in_memory = len(PARTY_WAYS) * TABLES * REPLACED
    typed = (len(DTYPES) + len(TORCH_DTYPES)) * TYPED

    assert in_memory + typed + len(FILE_WAYS) * FILE_TABLES * FILE_REPLACED >= 10_000


@pytest.mark.parametrize("way", PARTY_WAYS)
def test_one_record_changes_one_row_of_a_party(way: str) -> None:
    """Lists, arrays and frames of whatever cells, with labels of whatever type."""
    found = party_interference(way)

    assert not found, found


def party_interference(way: str, num_tables: int = TABLES) -> str:
    """Return what a random replacement changes beside its row, or "" if none does."""
    taken, rng = PARTY_WAYS[way], np.random.default_rng(len(way))
    for _ in range(num_tables):
        rows, labels = taken.table(rng)
        others = [taken.record(rng) for _ in range(REPLACED)]
        if found := interference(taken.encode, rows, labels, others):
            return found
    return ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("public", [np.float64, np.float32, np.int64, np.uint8, None])
def test_one_record_changes_one_row_of_an_array(dtype: str, public: Any) -> None:
    """Of any type and any bits, beside public rows of any type."""
    rng, kind = np.random.default_rng(1), np.dtype(dtype)
    rows = None if public is None else np.abs(PUBLIC.x * 10).astype(public)
    y = np.arange(NUM_RECORDS) % NUM_CLASSES
    x = typed_rows(rng, kind, NUM_RECORDS)
    first = through_party(x, y, public=rows)

    for other in typed_rows(rng, kind, TYPED // 5):
        changed = x.copy()
        changed[-1] = other
        found = differing(first, through_party(changed, y, public=rows))
        assert found in ([], [NUM_RECORDS - 1]), other


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_one_record_changes_one_row_of_a_tensor(name: str) -> None:
    """Of any type, dense or sparse."""
    rng, dtype = np.random.default_rng(2), getattr(torch, name)
    y = torch.arange(NUM_RECORDS) % NUM_CLASSES

    def tensor(rows: Array) -> Any:
        with np.errstate(all="ignore"):
            return torch.tensor(rows).to(dtype)

    x = rng.normal(size=(NUM_RECORDS, 3)) * 100
    first = through_party(tensor(x), y)
    for place in range(TYPED):
        changed = x.copy()
        changed[-1] = [pick(rng, FLOATS) for _ in range(3)] if place % 2 else rng.normal(size=3)
        given = tensor(changed).to_sparse() if place % 4 == 3 else tensor(changed)
        assert differing(first, through_party(given, y)) in ([], [NUM_RECORDS - 1])


def test_types_of_the_same_numbers_are_one() -> None:
    """Whole numbers, fractions, texts and objects: the bits are those of float64."""
    x = np.random.default_rng(3).integers(-300, 300, size=(NUM_RECORDS, 3))
    y = np.arange(NUM_RECORDS) % NUM_CLASSES
    first = through_party(x, y)

    assert np.abs(first.x).max() < 300
    for kind in ("int16", "float32", "float64", "longdouble", "complex128", "U8", "S8", "O"):
        assert differing(first, through_party(x.astype(kind), y)) == []
    for other in (
        x.tolist(),
        pd.DataFrame(x),
        pd.DataFrame(x).astype("Int64"),
        torch.tensor(x),
    ):
        assert differing(first, through_party(other, y)) == []


# Files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def file_record(way: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return a record that one can write in a file of this kind."""
    label = pick(rng, FILE_LABELS)
    if way in TABLE_WAYS:
        return table_row(rng), label
    if way in ("csv_of_archive", "typed_parquet"):
        cells = [cell for cell in (*FLOATS, *TEXTS) if "," not in str(cell)]
        return odd_row(rng, cells), pick(rng, FILE_LABELS[:-1])
    # numpy makes objects of larger whole numbers, and archives of objects are not opened.
    cells = [cell for cell in FLOATS if isinstance(cell, float) or abs(cell) < 2**63]
    return odd_row(rng, (*cells, *TEXTS)), label


@pytest.mark.parametrize("way", FILE_WAYS)
def test_one_record_changes_one_row_of_a_file(way: str, folder: Files) -> None:
    """Tables and archives, in deployments and simulations."""
    found = file_interference(way, folder)

    assert not found, found


def file_interference(way: str, folder: Files, num_tables: int = FILE_TABLES) -> str:
    rng = np.random.default_rng(len(way))
    in_tables = way in TABLE_WAYS
    for _ in range(num_tables):
        odd = [file_record(way, rng) for _ in range(pick(rng, (0, NUM_RECORDS // 2)))]
        rest, whole = NUM_RECORDS - len(odd), pick(rng, (True, False, None))
        valid = [clean_row(rng) if in_tables else plain_row(rng, whole) for _ in range(rest)]
        rows = [*valid, *(row for row, _ in odd)]
        labels = [*("01211" * 2)[:rest], *(label for _, label in odd)]
        others = [file_record(way, rng) for _ in range(FILE_REPLACED)]
        if found := interference(getattr(folder, way), rows, labels, others):
            return found
    return ""


@pytest.mark.parametrize("line", ODD_LINES, ids=range(len(ODD_LINES)))
def test_a_line_that_is_no_row_changes_no_other(line: str, folder: Files) -> None:
    """Of too many or too few cells, with an open quote, or very long."""
    rows: list[Any] = [table_row(np.random.default_rng(n)) for n in range(NUM_RECORDS)]
    labels = ["0", "1"] * (NUM_RECORDS // 2)
    first = folder.csv(rows, labels)
    other = folder.csv([*rows[:-1], line], labels)
    # A row whose label is empty is no record.
    assert len(other.x) in (NUM_RECORDS - 1, NUM_RECORDS)
    kept = NUM_RECORDS - 1
    assert (
        differing(
            Encoded(first.x[:kept], first.y[:kept]), Encoded(other.x[:kept], other.y[:kept])
        )
        == []
    )


# The check finds what was wrong once


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def by_inference(self: RecordForm, owner: str, name: str, value: Any) -> Array:
    """Read all records in the type that numpy infers, and cut fractions alone."""
    rows = to_array(owner, name, value)
    return np.clip(rows, -self.bound, self.bound) if rows.dtype.kind == "f" else rows


def uncut_integers(self: RecordForm, owner: str, name: str, value: Any) -> Array:
    """Read as it should be, but leave whole numbers as they are."""
    rows = to_array(owner, name, value)
    return (
        rows.astype(np.float64) if rows.dtype.kind in "iu" else READ(self, owner, name, value)
    )


READ = RecordForm.read


@pytest.mark.parametrize("broken", [by_inference, uncut_integers])
@pytest.mark.parametrize("way", ["list", "frame", "array by inference", "dealt lists"])
def test_the_check_finds_types_by_inference(
    broken: Callable[..., Array], way: str, patch: pytest.MonkeyPatch
) -> None:
    """Put back: one fraction decides how all records are read, or whether they are cut."""
    patch.setattr(RecordForm, "read", broken)

    assert party_interference(way)


@pytest.mark.parametrize("way", ["csv", "csv_gz"])
def test_the_check_finds_columns_by_inference(
    way: str, folder: Files, patch: pytest.MonkeyPatch
) -> None:
    """Put back: pandas decides by all cells of a column what they are."""

    def infer(path: Path) -> Any:
        missing = [word for word in table_cells.MISSING if word]
        return pd.read_csv(path, na_values=missing, low_memory=False, dtype={"label": str})

    patch.setattr(data, "read_table", infer)

    assert file_interference(way, folder)


def test_the_check_finds_dates_whose_range_one_cell_decides(
    folder: Files, patch: pytest.MonkeyPatch
) -> None:
    """Put back: nine digits of a second make years before 1678 missing everywhere."""
    never = table_cells.re.compile("(x)(?!)")
    patch.setattr(table_cells, "_BELOW_MICROSECONDS", never)

    assert file_interference("csv", folder, 20)


@pytest.mark.parametrize("way", ["simulated_npz", "simulated_images"])
def test_the_check_finds_scales_that_overflow(
    way: str, folder: Files, patch: pytest.MonkeyPatch
) -> None:
    """Put back: a value of 3e37 becomes infinite, and a party would fail or see NaN."""

    def unbounded(x: Array, *, public: Array, mean: Any, deviation: Any) -> Array:
        del public
        with np.errstate(all="ignore"):
            return ((x - mean) / deviation).astype(np.float32)

    patch.setattr(files, "_scaled", unbounded)
    patch.setattr(RecordForm, "read", lambda _, __, ___, value: value)

    assert "not finite" in file_interference(way, folder)


def test_the_check_finds_errors(patch: pytest.MonkeyPatch) -> None:
    """Put back: what numpy cannot read as an array ends in an error."""
    patch.setattr(
        party_module, "_record", lambda row, shape: np.asarray(row, float).reshape(shape)
    )

    assert party_interference("list").startswith("an error")


def test_the_check_finds_labels_by_inference(patch: pytest.MonkeyPatch) -> None:
    """Put back: one number among truth values makes numbers of all of them."""
    flat = party_module._flat

    def infer(owner: str, name: str, given: Any) -> Any:
        return flat(owner, name, np.array(given) if isinstance(given, list) else given)

    patch.setattr(party_module, "_flat", infer)

    assert party_interference("truth values of classes", 40)
