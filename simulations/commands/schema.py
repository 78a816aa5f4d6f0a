"""The command ``schema``: a draft of a schema, from a public file or a data dictionary."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from fl_strategies._util import FloatArray
from fl_strategies.errors import require, require_data
from simulations.commands.run import say
from simulations.data.schema import Schema
from simulations.data.tables import (
    ISO,
    MISSING,
    MOST_NUMBERS,
    Categories,
    Dates,
    Numbers,
    TableEncoder,
    date_points,
    decimal_comma,
    label_classes,
    label_texts,
    names_in,
    numbers,
    read_table,
    require_label,
)

OWNER: Final = "schema"
MANY: Final = 50
"""A column of more categories deserves a look."""
FEW: Final = 10
"""Whole numbers of so few different values may be codes."""
SKEWED: Final = 0.05
"""Share of the largest value that a mean is below where the logarithm counts."""
FIELDS: Final = ("name", "type", "least", "most", "values")
PUBLIC_ONLY: Final = (
    "LOOK AT THIS: bounds and values are those of this file, so it must be public. They must "
    "not come from private records."
)


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``schema``."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a public table, or with --dictionary one"
    )
    parser.add_argument("--label", metavar="COLUMN", help="column to predict", required=True)
    parser.add_argument("--drop", metavar="COLUMNS", default="", help="columns to leave out")
    parser.add_argument(
        "--dictionary",
        action="store_true",
        help=f"FILE is a table of columns: {', '.join(FIELDS)} (values with | between them)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", default=Path("schema.json"), help="its file"
    )
    parser.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> int:
    path, drop = options.file, names_in(options.drop)
    require(path.is_file(), OWNER, "file", "a table that exists", str(path))
    table = read_table(path)
    make = from_dictionary if options.dictionary else from_public
    schema, notes = make(path.name, table, options.label, drop)
    schema.save(options.output)
    for line in (*schema.describe(options.output.name), *notes):
        say(f"{line}\n")
    print(f"schema: {options.output}")
    return 0


# From a public file


def from_public(
    owner: str, table: Any, label: str, drop: tuple[str, ...] = ()
) -> tuple[Schema, list[str]]:
    """Return a schema of a public table, and what somebody should look at.

    Bounds are rounded outward to round numbers, and dates to whole years.
    """
    require_label(owner, label, [str(name) for name in table.columns])
    target = _label(owner, label, table[label])
    encoder = TableEncoder.learn(owner, table.drop(columns=label), drop)
    columns: dict[str, Any] = {}
    notes = [PUBLIC_ONLY]
    for column in encoder.columns:
        cells = table[column.name]
        if isinstance(column, Categories):
            columns[column.name], found = _category(column)
        elif isinstance(column, Dates):
            columns[column.name], found = _date(column, cells), []
        else:
            columns[column.name], found = _number(column, cells)
        notes += [f"LOOK AT THIS: {note}" for note in found]
    notes += [f"left out: {name} ({why})" for name, why in encoder.dropped.items()]
    return Schema.of({"label": target, "columns": columns}, owner), notes


def _label(owner: str, label: str, column: Any) -> dict[str, Any]:
    """Return classes, or bounds of numbers that are none."""
    present = [text for text in label_texts(column).tolist() if text not in MISSING]
    comma = decimal_comma(present)
    if present and comma is not None:
        found = numbers(column, comma=comma)
        found = found[~np.isnan(found)]
        if (found % 1 != 0).any() or len(np.unique(found)) > MOST_NUMBERS:
            least, most = outward(float(found.min()), float(found.max()))
            return {"name": label, "least": least, "most": most}
    classes, _ = label_classes(owner, label, column)
    return {"name": label, "classes": [*classes]}


def _category(column: Categories) -> tuple[dict[str, Any], list[str]]:
    values = [value for value in column.values if value]
    notes = []
    if len(values) > MANY:
        rest = f" of {len(values) + column.num_rare}" if column.num_rare else ""
        notes.append(
            f"{column.name} has {len(values)}{rest} categories; each costs accuracy under noise"
        )
    return {"type": "category", "values": values}, notes


def _number(column: Numbers, cells: Any) -> tuple[dict[str, Any], list[str]]:
    found = numbers(cells, comma=column.comma)
    found = found[~np.isnan(found)]
    least, most = outward(float(found.min()), float(found.max()))
    plain: dict[str, Any] = {"type": "number", "least": least, "most": most}
    if column.comma:
        plain["comma"] = True
    notes, distinct = [], len(np.unique(found))
    if 2 < distinct <= FEW and (found % 1 == 0).all():
        notes.append(
            f"{column.name} has {distinct} whole numbers; if they are codes, declare a category"
        )
    if distinct == len(found) > FEW and (found % 1 == 0).all():
        notes.append(
            f"{column.name} differs in every row, as an id does; leave it out if it is one"
        )
    if least >= 0 and _is_skewed(found):
        plain["log"] = True
        notes.append(
            f"{column.name} is far below {most:g} mostly, so that its logarithm counts"
        )
    return plain, notes


def _is_skewed(found: FloatArray) -> bool:
    return float(found.mean()) < SKEWED * float(found.max())


def _date(column: Dates, cells: Any) -> dict[str, Any]:
    years = date_points(cells, column.form).dropna().dt.year
    plain = {
        "type": "date",
        "least": f"{years.min():04d}-01-01",
        "most": f"{years.max():04d}-12-31",
    }
    return plain if column.form == ISO else {**plain, "format": column.form}


def outward(least: float, most: float) -> tuple[float, float]:
    """Return round numbers that have two others between them, at least one apart from each.

    Examples
    --------
    >>> outward(17, 90), outward(3, 99_999), outward(-0.123, 0.456)
    ((10, 90), (0, 100000), (-0.2, 0.5))
    """
    width = most - least if most > least else max(abs(most), 1.0)
    power = math.floor(math.log10(width / 2))
    step = 10.0**power
    low, high = math.floor(least / step), math.ceil(most / step)
    high += low == high
    if power >= 0:
        return low * int(step), high * int(step)
    return round(low * step, -power), round(high * step, -power)


# From a data dictionary


def from_dictionary(
    owner: str, table: Any, label: str, drop: tuple[str, ...] = ()
) -> tuple[Schema, list[str]]:
    """Return the schema that a table of columns describes, a row for each."""
    fields = {str(name).strip().lower(): name for name in table.columns}
    missing = [name for name in FIELDS[:2] if name not in fields]
    rule = f"those of a data dictionary ({', '.join(FIELDS)})"
    require_data(not missing, owner, "the columns", rule, f"no {', '.join(missing)}")
    columns: dict[str, Any] = {}
    for row in _rows(table, fields):
        name = row.pop("name")
        require_data(name not in columns, owner, "names", "different", name)
        if name not in drop:
            columns[name] = row
    require_label(owner, label, [*columns])
    target = columns.pop(label)
    if target.get("type") == "category":
        described = {"name": label, "classes": target.get("values", [])}
    else:
        described = {"name": label, **{k: target[k] for k in FIELDS[2:4] if k in target}}
    return Schema.of({"label": described, "columns": columns}, owner), []


def _rows(table: Any, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a dictionary says about each column, without what it leaves empty."""
    cells = {key: label_texts(table[name]).tolist() for key, name in fields.items()}
    for place in range(len(table)):
        row: dict[str, Any] = {key: cells[key][place] for key in FIELDS if key in cells}
        row = {key: text for key, text in row.items() if text}
        if "name" not in row:
            continue
        row["type"] = row.get("type", "").lower()
        if "values" in row:
            row["values"] = [value.strip() for value in row["values"].split("|")]
        if row["type"] == "number":
            row |= {key: _number_in(row[key]) for key in FIELDS[2:4] if key in row}
        yield row


def _number_in(text: str) -> float | str:
    """Return the number that a text is, or the text, which the schema's reader then names."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
