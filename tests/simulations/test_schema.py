"""Schemas: declared bounds and categories in the place of public rows."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context

from clients import client_app
from fl_strategies import Party
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.commands import main as command
from simulations.commands.schema import from_public
from simulations.config import Settings, Value
from simulations.data.schema import Schema, SchemaLabel
from simulations.data.tables import UNLABELLED
from simulations.deploy import server_app
from simulations.deploy.__main__ import main
from simulations.deploy.client_app import build_party, understood
from simulations.federation import Federation, load_federation
from simulations.runtime.local import run_local, run_once
from tests.attacks.ways_in import TABLE_TEXTS

PLAIN: dict[str, Any] = {
    "label": {"name": "state", "classes": ["ill", "well"]},
    "columns": {
        "age": {"type": "number", "least": 20, "most": 100, "usual": 50},
        "gain": {"type": "number", "least": 0, "most": 999, "log": True},
        "hours": {"type": "number", "least": 0, "most": 80, "cuts": [35, 41]},
        "town": {"type": "category", "values": ["Bonn", "Ulm"]},
        "seen": {"type": "date", "least": "2020-01-01", "most": "2020-12-31"},
    },
}
ROW = {"age": "50", "gain": "0", "hours": "20", "town": "Ulm", "seen": "2020-07-01"}


def changed(**columns: Any) -> dict[str, Any]:
    """Return plain values with other columns; None: without it."""
    both = {**PLAIN["columns"], **columns}
    return {**PLAIN, "columns": {k: v for k, v in both.items() if v is not None}}


def encoded(**cells: Any) -> list[float]:
    """Return a row with some other cells."""
    row: list[float] = Schema.of(PLAIN).encode(pd.DataFrame([{**ROW, **cells}]))[0].tolist()
    return row


# Cells


@pytest.mark.parametrize(
    ("cells", "place", "expected"),
    [
        ({"age": "75"}, 0, [0.5]),
        ({"age": "20"}, 0, [-0.6]),
        ({"age": "300"}, 0, [1.0]),
        ({"age": "-1e400"}, 0, [0.0]),  # no number that anything can hold: a gap
        ({"age": "?"}, 0, [0.0]),
        ({"age": "about 75"}, 0, [0.0]),
        ({"gain": "999"}, 1, [1.0]),
        ({"gain": "99"}, 1, [2 / 3]),
        ({"hours": "35"}, 2, [0.0, 1.0, 0.0]),
        ({"hours": "41"}, 2, [0.0, 0.0, 1.0]),
        ({"hours": ""}, 2, [0.0, 0.0, 0.0]),
        ({"town": "Bonn"}, 5, [1.0, 0.0]),
        ({"town": " ulm "}, 5, [0.0, 1.0]),
        ({"town": "Kiel"}, 5, [0.0, 0.0]),
        ({"seen": "2020-12-31"}, 7, [1.0]),
        ({"seen": "1500-01-01"}, 7, [-1.0]),
        ({"seen": "2020-02-30"}, 7, [0.0]),
    ],
)
def test_a_cell_becomes_its_place_between_the_bounds(
    cells: dict[str, str], place: int, expected: list[float]
) -> None:
    """Values beyond are cut, and what cannot be read is a gap, of zeros."""
    row = encoded(**cells)

    assert row[place : place + len(expected)] == pytest.approx(expected)
    assert row[:place] == encoded()[:place]


def test_no_row_is_longer_than_declared() -> None:
    rng, schema = np.random.default_rng(0), Schema.of(PLAIN)
    cells = [[str(rng.choice([*TABLE_TEXTS, *ROW.values()])) for _ in ROW] for _ in range(500)]

    x = schema.encode(pd.DataFrame(cells, columns=[*ROW]))

    low, high = schema.bounds
    assert x.dtype == np.float32
    assert (x >= low - 1e-6).all()
    assert (x <= high + 1e-6).all()
    assert np.linalg.norm(x, axis=1).max() <= schema.longest_row + 1e-6
    assert schema.row_length == pytest.approx(math.sqrt(2 + 3 / 9))


def test_a_cell_changes_one_row_and_never_fails() -> None:
    """Any text in any column, beside any others: the other rows keep their bits."""
    rng, schema = np.random.default_rng(1), Schema.of(PLAIN)
    odd = (*TABLE_TEXTS, *ROW.values(), "NaT", "x" * 1000, "1e5", "TRUE")
    for _ in range(100):
        rows = [[str(rng.choice(odd)) for _ in ROW] for _ in range(6)]
        first = schema.encode(pd.DataFrame(rows, columns=[*ROW]))
        for place in range(len(ROW)):
            rows[-1][place] = str(rng.choice(odd))
            other = schema.encode(pd.DataFrame(rows, columns=[*ROW]))
            assert np.isfinite(other).all()
            assert np.array_equal(other[:-1], first[:-1])


def test_typed_columns_are_read_as_their_texts() -> None:
    texts = pd.DataFrame([ROW, {**ROW, "age": "31", "town": "Bonn"}])
    typed = texts.assign(
        age=texts.age.astype("float64"),
        hours=texts.hours.astype("Int64"),
        town=texts.town.astype("category"),
        seen=pd.to_datetime(texts.seen),
    )

    schema = Schema.of(PLAIN)

    assert np.array_equal(schema.encode(texts), schema.encode(typed))


def test_only_the_reader_is_told_what_did_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame([{**ROW, "town": "Kiel"}, {**ROW, "age": "x"}, ROW])
    table = table.rename(columns={"seen": "Seen"})

    with caplog.at_level(logging.WARNING):
        x = Schema.of(PLAIN).encode(table, "mine.csv")

    assert x[:, 7].tolist() == [0.0, 0.0, 0.0]
    what = "are not what the schema says there, and count as gaps."
    gap = f"mine.csv: 1 values of column %r {what}"
    missing = "columns of the schema that are missing, and so gaps: seen (is it 'Seen'?)."
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"mine.csv: {missing}", gap % "age", gap % "town"]
    assert "Kiel" not in caplog.text


def test_a_table_of_other_columns_is_refused() -> None:
    with pytest.raises(InvalidData, match="the columns must be some of the schema's"):
        Schema.of(PLAIN).encode(pd.DataFrame({"x0": ["1"]}), "mine.csv")


def test_labels_beyond_the_classes_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    schema = Schema.of(PLAIN)

    y = schema.class_indices(pd.Series(["well", "ILL", "", "NA", "dead"]), "mine.csv")

    assert y.tolist() == [1, 0, UNLABELLED, UNLABELLED, UNLABELLED]
    assert "mine.csv: 1 labels are not in the schema's classes ill, well" in caplog.text
    with pytest.raises(InvalidData, match="label 'state' must be in the schema's classes"):
        schema.class_indices(pd.Series(["dead"]), "mine.csv")


# Files


def test_a_schema_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    schema, path = Schema.of(PLAIN), tmp_path / "schema.json"

    schema.save(path)

    found = Schema.load(path)
    assert found.to_plain() == schema.to_plain() == PLAIN
    assert "must not come from private records" in path.read_text()
    assert '"town": {"type": "category", "values": ["Bonn", "Ulm"]},\n' in path.read_text()


def test_the_hash_is_of_what_a_schema_means(tmp_path: Path) -> None:
    path, first = tmp_path / "schema.json", Schema.of(PLAIN)
    path.write_text(json.dumps({"about": "ours", **PLAIN}, indent=8))

    assert Schema.load(path).hash == first.hash
    order = dict(reversed(PLAIN["columns"].items()))
    others = [
        {**PLAIN, "columns": order},
        {**PLAIN, "label": {"name": "state", "classes": ["well", "ill"]}},
        changed(age={"type": "number", "least": 20, "most": 101, "usual": 50}),
        changed(town={"type": "category", "values": ["Bonn", "Ulm", "Kiel"]}),
    ]
    assert len({first.hash, *(Schema.of(other).hash for other in others)}) == 5


DEFECTS: list[tuple[Any, str]] = [
    ([], "the schema must be names with values in braces"),
    ({"columns": {}}, "columns must have at least one column"),
    (changed(age={"type": "number"}), "column 'age': least must be a number, got none"),
    (changed(age={"type": "number", "least": 5, "most": 5}), "least must be below most"),
    (changed(age={"type": "number", "least": 1, "most": 1e400}), "a number up to 1e30"),
    (changed(age={"type": "number", "least": True, "most": 3}), "must be a number, got 'True'"),
    (
        changed(age={"type": "numeric"}),
        "must have a type, number, date, category",
    ),
    (
        changed(age={"type": "number", "least": 1, "most": 2, "mots": 2}),
        "column 'age' has the unknown key 'mots' (Did you mean 'most'?)",
    ),
    (
        changed(age={"type": "number", "least": 1, "most": 2, "usual": 3}),
        "column 'age': usual must be between least and most",
    ),
    (
        changed(age={"type": "number", "least": 1, "most": 9, "cuts": [3, 2]}),
        "column 'age': cuts must ascend between least and most",
    ),
    (changed(town={"type": "category", "values": []}), "values must be at least 1, got 0"),
    (
        changed(town={"type": "category", "values": ["a", "a"]}),
        "different, got a twice",
    ),
    (changed(town={"type": "category", "values": ["NA"]}), "other words than those for gaps"),
    (
        changed(seen={"type": "date", "least": "1.1.2020", "most": "2020-01-01"}),
        "column 'seen': least must be a date such as 2024-01-31, got '1.1.2020'",
    ),
    (changed(state={"type": "number", "least": 0, "most": 1}), "the label 'state' is among"),
    ({**PLAIN, "label": {"name": "state"}}, "label must have classes, or least and most"),
    ({**PLAIN, "label": {"name": "state", "classes": ["a"]}}, "classes must be at least 2"),
]


@pytest.mark.parametrize(("given", "sentence"), DEFECTS, ids=[s for _, s in DEFECTS])
def test_each_defect_is_named(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidData, match=r"schema\.json: the schema must be sound") as error:
        Schema.of(given, "schema.json")

    assert sentence in str(error.value)


def test_all_defects_are_named_at_once() -> None:
    given = changed(age={"type": "number", "most": 3}, town={"type": "category"})

    with pytest.raises(InvalidData) as error:
        Schema.of(given)

    assert str(error.value).count("; ") == 1


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("label: state")

    with pytest.raises(InvalidData, match=r"schema\.json: the schema must be JSON, got"):
        Schema.load(path)
    path.write_text('{"label": {}, "columns": {"age": {}, "town": {}, "age": {}}}')
    with pytest.raises(InvalidData, match=r"the schema must be JSON, got age twice"):
        Schema.load(path)
    with pytest.raises(InvalidParameter, match="schema must be a file that exists"):
        Schema.load(tmp_path / "none.json")


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a table of 320 rows, of which old people in Ulm are ill, and its schema."""
    folder, rng = tmp_path_factory.mktemp("schema"), np.random.default_rng(0)
    age, town = rng.integers(20, 100, 320), rng.choice(["Bonn", "Ulm"], 320)
    ill = age + 30 * (town == "Ulm") + rng.normal(0, 5, 320) > 75
    columns = {"age": age, "town": town, "state": np.where(ill, "ill", "well"), "name": age}
    pd.DataFrame(columns).to_csv(folder / "t.csv", index=False)
    Schema.of(changed(gain=None, hours=None, seen=None)).save(folder / "schema.json")
    return folder


def federation(folder: Path, **given: Any) -> Federation:
    settings = Settings.of(
        **{
            "data": str(folder / "t.csv"),
            "schema": str(folder / "schema.json"),
            "strategy": "fedmoments",
            "num_parties": 3,
            "num_workers": 1,
            "solo": False,
            "pooled": False,
            **given,
        }
    )
    return load_federation(settings)


@pytest.mark.parametrize("privacy", [{}, {"privacy_level": "central", "target_epsilon": 5.0}])
def test_a_run_needs_no_public_rows(folder: Path, privacy: dict[str, Any]) -> None:
    found = federation(folder, **privacy)

    report = run_once(found.settings)

    data = found.dataset
    assert (len(data.x_train), data.x_public.shape, len(data.x_test)) == (280, (0, 3), 40)
    assert data.encoding == Schema.load(folder / "schema.json").hash
    assert report["accuracy"] > 0.85
    assert report["num-public-rows"] == 0
    assert found.describe_data().count("3 numbers, as schema.json declares (hash ") == 1


@pytest.mark.parametrize("given", [{"strategy": "fedhistogram"}, {"public_rows": 30}])
def test_public_rows_are_read_by_the_schema_too(folder: Path, given: dict[str, Any]) -> None:
    without, found = federation(folder).dataset, federation(folder, **given).dataset

    assert len(found.x_public) == given.get("public_rows", 40)
    assert len(found.x_train) == 240
    assert np.array_equal(found.x_test, without.x_test)
    assert {*map(bytes, found.x_public)} <= {*map(bytes, without.x_train)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"data": "digits"}, "schema must be omitted unless data is a table"),
        (
            {"drop": "name"},
            "drop must be omitted with a schema, which lists the columns",
        ),
        ({"encoder": "wordllama"}, "encoder must be omitted with a schema"),
        ({"label": "age"}, "label must be omitted, or 'state' as in the schema, got 'age'"),
    ],
)
def test_settings_that_contradict_a_schema_are_refused(
    folder: Path, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        federation(folder, **given)


# Deployed


def write_party(folder: Path, number: int) -> Path:
    """Write a party's own table: of some rows, and in another order of columns."""
    table = pd.read_csv(folder / "t.csv", dtype=str).iloc[number::2, ::-1]
    path = folder / f"party-{number}.csv"
    table.to_csv(path, index=False)
    return path


def node(folder: Path, number: int, **more: Value) -> dict[str, Value]:
    return {
        "partition-id": number,
        "num-partitions": 2,
        "data-file": str(write_party(folder, number)),
        "schema": str(folder / "schema.json"),
        "learner": "extra-trees",
        "allow-unprotected": True,
        **more,
    }


def run_deployed(folder: Path, nodes: Sequence[dict[str, Value]], **more: Value) -> Any:
    run: dict[str, Value] = {
        "strategy": "fedmoments",
        "schema": str(folder / "schema.json"),
        "test-file": str(folder / "t.csv"),
        "num-parties": 2,
        "min-parties": 1,
        "max-wait": 0.1,
    }
    federation = server_app.load({**run, **more})
    strategy = federation.strategy()

    def load_party(context: Context) -> Party:
        return build_party(nodes[int(context.node_config["partition-id"])], run="1")

    run_local(strategy, client_app(load_party), 2)
    return federation, strategy


def test_a_deployment_needs_a_schema_and_no_public_file(folder: Path) -> None:
    """Classes and label follow from it, and columns are found by their names."""
    nodes = [node(folder, number) for number in range(2)]

    federation, strategy = run_deployed(folder, nodes)

    assert not strategy.rejected_
    assert federation.quality(strategy.model_) > 0.85
    assert understood(nodes[0]) == [*federation.dataset.understood]
    x = Schema.load(folder / "schema.json").encode(pd.read_csv(folder / "t.csv", dtype=str))
    assert build_party(nodes[1], run="1").x.tobytes() == x[1::2].tobytes()


def test_a_party_with_another_schema_refuses_before_it_pays(folder: Path) -> None:
    """Whatever differs in meaning; the other party is not affected."""
    other = folder / "other.json"
    wider = {"type": "number", "least": 20, "most": 101, "usual": 50}
    Schema.of(changed(gain=None, hours=None, seen=None, age=wider)).save(other)
    state = folder / "state"
    more: dict[str, Value] = {"schema": str(other), "state-dir": str(state), "max-epsilon": 9.0}
    closed = {key: v for key, v in node(folder, 1).items() if key != "allow-unprotected"}

    privacy: dict[str, Value] = {"fedmoments.target-epsilon": 8.0, "num-records": 320}
    nodes = [node(folder, 0), {**closed, **more}]
    _, strategy = run_deployed(folder, nodes, **{"fedmoments.privacy-level": "L2"}, **privacy)

    (reason,) = strategy.rejected_.values()
    assert "encoding must be the server's (hash " in reason
    assert "Give server and parties the same schema" in reason
    journal = build_party(nodes[1], run="2").journal
    assert journal is not None
    assert journal.epsilon() == 0


def test_a_check_shows_what_a_schema_makes_of_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pd.read_csv(write_party(folder, 0), dtype=str)
    table.loc[0, "town"] = "Kiel"
    table.to_csv(folder / "mine.csv", index=False)
    config = {**node(folder, 0), "data-file": str(folder / "mine.csv")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (folder / "node.toml").write_text("\n".join(lines))

    main(["check", str(folder / "node.toml")])

    shown = capsys.readouterr().out
    assert "2 columns become 3 numbers, as the schema declares (hash " in shown
    assert "categories (1): town (2)" in shown
    assert "public rows: 0, classes: 2" in shown
    (refused,) = [line for line in shown.splitlines() if "public rows must be given" in line]
    assert "fedkd" in refused
    assert "fedmoments" not in refused
    assert "1 values of column 'town' are not what the schema says there" in shown


def test_a_public_file_is_read_by_the_schema_too(folder: Path) -> None:
    public = folder / "public.csv"
    pd.read_csv(folder / "t.csv", dtype=str).iloc[:50].to_csv(public, index=False)
    nodes = [node(folder, n, **{"public-file": str(public)}) for n in range(2)]

    federation, strategy = run_deployed(
        folder, nodes, **{"strategy": "fedhistogram", "public-file": str(public)}
    )

    assert not strategy.rejected_
    assert federation.dataset.x_public.shape == (50, 3)


@pytest.mark.parametrize(
    ("server", "party", "sentence"),
    [
        ({"strategy": "fedkt"}, {}, "without public rows, which a schema does not replace"),
        ({"classes": "ill,dead"}, {}, "classes must be omitted, or the schema's ill, well"),
        ({"encoder": "scattering"}, {}, "encoder must be omitted with a schema"),
        ({"drop": "name"}, {}, "drop must be omitted with a schema"),
        ({}, {"label": "town"}, "label must be omitted, or 'state' as in the schema"),
        ({}, {"schema": "schema.json"}, "schema must be an absolute path"),
        ({}, {"schema": "/none.json"}, "schema must be a file that exists"),
    ],
)
def test_deployments_that_contradict_a_schema_are_refused(
    folder: Path, server: dict[str, Value], party: dict[str, Value], sentence: str
) -> None:
    def load() -> None:
        build_party(node(folder, 0, **party), run="1")
        run_deployed(folder, [], **server)

    with pytest.raises(InvalidParameter, match=sentence):
        load()


# The command


def written(folder: Path, *options: str) -> dict[str, Any]:
    """Return what the command writes, read again."""
    path = folder / "written.json"

    assert command(["schema", *options, "-o", str(path)]) == 0

    return Schema.load(path).to_plain()


def test_a_public_file_gives_a_schema_with_round_bounds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.arange(60)
    table = pd.DataFrame(
        {
            "patient_id": [f"p{n}" for n in rows],
            "age": 17 + rows * 7 % 60,
            "gain": [12345 if n == 5 else n % 3 for n in rows],
            "price": [f"{n},{n % 9}5" for n in rows],
            "seen": [f"{1 + n % 28}.02.{2015 + n % 3}" for n in rows],
            "street": [f"street {n}" for n in [*range(55), 0, 1, 2, 3, 4]],
            "grade": rows % 4,
            "state": ["ill", "well"] * 30,
        }
    )
    table.loc[3, "street"] = ""
    table.to_csv(folder / "public.csv", index=False, sep=";")

    plain = written(folder, str(folder / "public.csv"), "--label", "state", "--drop", "street")

    assert plain["label"] == {"name": "state", "classes": ["ill", "well"]}
    assert plain["columns"] == {
        "age": {"type": "number", "least": 10, "most": 80},
        "gain": {"type": "number", "least": 0, "most": 13000, "log": True},
        "price": {"type": "number", "least": 0, "most": 60, "comma": True},
        "seen": {
            "type": "date",
            "least": "2015-01-01",
            "most": "2017-12-31",
            "format": "%d.%m.%Y",
        },
        "grade": {"type": "number", "least": 0, "most": 3},
    }
    told = capsys.readouterr().err
    assert "They must not come from private records." in told
    assert "grade has 4 whole numbers; if they are codes, declare a category" in told
    assert "left out: patient_id (an id)" in told
    assert "left out: street (asked for)" in told


def test_many_categories_and_numbers_like_ids_are_pointed_out() -> None:
    rows = np.arange(200)
    table = pd.DataFrame(
        {"case": rows[::-1] * 7, "town": [f"t{n % 60}" for n in rows], "cost": rows / 7}
    )

    schema, notes = from_public("public.csv", table.astype(str), "cost")

    assert schema.label == SchemaLabel(name="cost", least=0, most=30)
    assert [note.partition(": ")[2].partition(";")[0] for note in notes[1:]] == [
        "case differs in every row, as an id does",
        "town has 60 categories",
    ]


def test_a_data_dictionary_gives_a_schema(folder: Path) -> None:
    lines = [
        "Name,Type,Least,Most,Values,Meaning",
        "age,number,0,120,,in years",
        'town,category,,,"Bonn | Ulm",',
        "seen,date,2020-01-01,2024-12-31,,",
        "state,category,,,ill|well,",
    ]
    (folder / "dictionary.csv").write_text("\n".join(lines))

    plain = written(folder, str(folder / "dictionary.csv"), "--dictionary", "--label", "state")

    assert plain["label"] == {"name": "state", "classes": ["ill", "well"]}
    assert plain["columns"] == {
        "age": {"type": "number", "least": 0, "most": 120},
        "town": {"type": "category", "values": ["Bonn", "Ulm"]},
        "seen": {"type": "date", "least": "2020-01-01", "most": "2024-12-31"},
    }


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["a,b", "1,2"], "the columns must be those of a data dictionary"),
        (
            ["name,type,least,most", "age,number,0,x", "y,number,0,1"],
            "age': most must be a num",
        ),
        (
            ["name,type", "age,number", "y,number"],
            "column 'age': least must be a number, got none",
        ),
        (["name,type", "age,number", "age,number"], "names must be different, got age"),
        (["name,type", "age,number"], "label (--label, setting label) must be one of the col"),
    ],
)
def test_a_defect_of_a_dictionary_is_named(
    folder: Path, lines: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.csv").write_text("\n".join(lines))

    assert command(["schema", str(folder / "bad.csv"), "--dictionary", "--label", "y"]) == 1

    assert sentence in capsys.readouterr().err


def test_a_run_names_its_schema_by_an_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"data": folder / "t.csv", "schema": folder / "schema.json"}
    given = [f"--{name}={path}" for name, path in paths.items()]
    more = ["num-parties=2", "solo=false", "pooled=false", f"output-dir={folder / 'runs'}"]

    code = command(["run", "--strategy=fedmoments", *given, *(f"--set={one}" for one in more)])

    assert code == 0
    assert "0 public, 40 test" in capsys.readouterr().err
