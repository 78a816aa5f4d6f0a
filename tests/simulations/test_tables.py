"""Tables as people have them: holes, ids, dates and numbers in disguise."""

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import simulations
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.config import Settings, Value
from simulations.data.sets import Request, load_dataset
from simulations.data.splits import Dataset
from simulations.data.tables import TableEncoder
from simulations.deploy.__main__ import main
from simulations.deploy.client_app import build_party, understood
from simulations.deploy.data import read_labelled, read_public, read_rows
from simulations.federation import load_federation

COLOURS = ("blue", "green", "red")


def public_frame(**columns: Any) -> pd.DataFrame:
    """Return twenty rows with a column of numbers and one of words."""
    rows = np.arange(20)
    plain = {"age": 20.0 + rows % 7, "colour": [COLOURS[row % 3] for row in rows]}
    return pd.DataFrame({**plain, **columns})


def learn(frame: pd.DataFrame, *drop: str) -> TableEncoder:
    return TableEncoder.learn("t.csv", frame, drop)


def private(**cells: Any) -> pd.DataFrame:
    return pd.DataFrame({name: [cell] for name, cell in {**ROW, **cells}.items()})


ROW: dict[str, Any] = {"age": 23.0, "colour": "red"}


# Missing values


def test_missing_numbers_become_the_public_median_with_a_mark() -> None:
    """The mark is there if public rows have gaps, and says which rows had one."""
    frame = public_frame(weight=[np.nan, 60.0, 70.0, 90.0] * 5)
    encoder = learn(frame)

    x = encoder.encode("t.csv", frame)

    weights, marks = x[:, 4], x[:, 5]
    assert encoder.width == 1 + 2 + 3
    assert marks.tolist() == [1.0, 0.0, 0.0, 0.0] * 5
    assert len({*weights[[0, 2]].tolist()}) == 1
    assert "weight (missing ones marked)" in encoder.describe()[1]


@pytest.mark.parametrize("cell", ["old", "1e400", np.inf, np.nan, "", "?", None])
def test_no_private_cell_is_an_error(cell: object, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever stands there counts as missing; the party's own log counts it, unquoted.

    No error and no column shows that a record has a gap.
    """
    encoder = learn(public_frame())

    with caplog.at_level(logging.WARNING):
        x = encoder.encode("mine.csv", private(age=cell))

    assert x.shape == (1, 4)
    assert np.isfinite(x).all()
    assert x[0, 0] == encoder.encode("mine.csv", private(age=23.0))[0, 0]
    told = cell in ("old", "1e400", np.inf)
    assert ("1 values of column 'age' are not what" in caplog.text) == told
    assert "old" not in caplog.text


def test_a_category_that_public_rows_lack_is_another_one_and_a_huge_number_finite() -> None:
    """All zeros, whatever the word is; no number overflows in the scale or in float32."""
    encoder = learn(public_frame())

    for word in ("violet", None):
        assert not encoder.encode("mine.csv", private(colour=word))[0, 1:].any()
    assert encoder.encode("mine.csv", private(age=1e308))[0, 0] == np.float32(1e30)


# Numbers in disguise


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["$1,234.50", "$99.00"], [1234.5, 99.0]),
        (["1.234,50 €", "99,00 €"], [1234.5, 99.0]),
        (["1,234", "12"], [1234.0, 12.0]),
        (["3,14", "0,125"], [3.14, 0.125]),
        (["12 %", "5%"], [0.12, 0.05]),
        (["12 000", "1'000"], [12000.0, 1000.0]),
        (["-1.5e3", "+2"], [-1500.0, 2.0]),
        (["TRUE", "false"], [1.0, 0.0]),
    ],
)
def test_texts_that_are_numbers_are_read_as_such(cells: list[str], values: list[float]) -> None:
    """Currencies, percent signs, separators of thousands and decimal commas are no words."""
    frame = public_frame(value=cells * 10)
    x = learn(frame).encode("t.csv", frame)[:2, 4]

    assert x.shape == (2,)
    wanted = (
        values if {*values} == {0.0, 1.0} else [1, -1] if values[0] > values[1] else [-1, 1]
    )
    assert x.tolist() == pytest.approx(wanted)


def test_a_private_cell_may_write_numbers_in_the_other_way() -> None:
    """If it cannot be meant in the public one."""
    encoder = learn(public_frame(value=["1.5", "2.5"] * 10))
    x = encoder.encode("mine.csv", private(value="2,5"))

    assert x[0, 4] == pytest.approx(1.0)


def test_numbers_with_words_in_between_are_refused_with_a_public_value() -> None:
    """The sentence quotes what is wrong, and says how to go on."""
    cells = [*map(str, range(100, 124)), "about 40"]
    frame = pd.DataFrame({"age": cells, "weight": np.arange(25.0) % 4})

    with pytest.raises(InvalidData, match=r"'age' must be numbers.*'about 40'.*--drop age"):
        learn(frame)
    assert learn(frame, "age").width == 1


# Columns of no use


@pytest.mark.parametrize(
    ("name", "cells", "why"),
    [
        ("patient_id", [f"P{row:03d}" for row in range(20)], "an id"),
        ("CustomerID", [*range(500, 510), *range(500, 510)][::-1], None),
        ("CustomerID", [7 * row % 101 for row in range(20)], "an id"),
        ("Unnamed: 0", list(range(20)), "an id"),
        ("row", list(range(1000, 1020)), "numbers the rows"),
        ("name", [f"Doe {row}" for row in range(20)], "different in every row"),
        ("site", ["Main"] * 20, "always the same"),
        ("level", [4.0] * 20, "always the same"),
        ("notes", [None] * 20, "empty"),
        ("paid", [7 * row % 101 for row in range(20)], None),
        ("grade", [f"g{row % 10}" for row in range(20)], None),
    ],
)
def test_columns_of_no_use_are_dropped_with_a_note(
    name: str, cells: list[Any], why: str | None
) -> None:
    """Ids, counters, constants and empty columns; names alone do not make an id."""
    encoder = learn(public_frame(**{name: cells}))

    assert encoder.dropped == ({} if why is None else {name: why})
    if why:
        assert f"dropped (1): {name} ({why})" in encoder.describe()


def test_a_few_public_rows_make_no_id() -> None:
    """That two towns differ is an accident."""
    frame = pd.DataFrame({"town": ["Ulm", "Bonn"], "age": [20, 40]})

    assert learn(frame).width == 3


def test_rare_words_beyond_the_limit_count_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most frequent categories stay, so that a column cannot fill the memory."""
    monkeypatch.setattr("simulations.data.tables.MAX_CATEGORIES", 2)
    words = ["a"] * 8 + ["b"] * 2 + ["c"] * 9 + ["d"]
    encoder = learn(public_frame(word=words))

    assert encoder.describe()[2].endswith("word (2 of 4)")
    assert encoder.encode("t", private(word="b"))[0, -2:].tolist() == [0, 0]
    assert encoder.encode("t", private(word="c"))[0, -2:].tolist() == [0, 1]


def test_nothing_of_use_is_a_sentence() -> None:
    """It says what became of each column."""
    with pytest.raises(InvalidData, match=r"other columns of use, got site \(always the same"):
        learn(pd.DataFrame({"site": ["Main"] * 20}))


# Dates


@pytest.mark.parametrize(
    "form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%dT%H:%M:%SZ", "%d %b %Y"]
)
def test_dates_become_numbers(form: str) -> None:
    """Year, month and weekday, as far as they vary; a broken one counts as missing."""
    days = pd.date_range("2023-11-05", periods=20, freq="17D")
    encoder = learn(public_frame(seen=days.strftime(form)))

    assert encoder.width == 4 + 3
    assert "seen (" in encoder.describe()[2]
    assert "year, month, weekday)" in encoder.describe()[2]
    x = encoder.encode("t", private(seen=days[3].strftime(form)))
    own = encoder.encode("t", private(seen="yesterday"))
    assert np.isfinite(own).all()
    typed = learn(public_frame(seen=days)).encode("t", private(seen=days[3]))
    assert x.tolist() == typed.tolist()


def test_dates_written_in_several_ways_are_called_so() -> None:
    """Whoever knows can repair them; other texts are free text."""
    days = pd.date_range("2023-11-05", periods=60, freq="17D")
    mixed = [day.strftime("%Y-%m-%d" if day.day % 2 else "%d.%m.%Y") for day in days]
    notes = [f"{day} or so" for day in mixed]
    frame = pd.DataFrame({"amount": [7, 8, 9, 7] * 15, "seen": mixed, "note": notes})

    assert learn(frame).dropped == {
        "seen": "dates written in several ways",
        "note": "different in every row",
    }


# Files


PUBLIC = "age,town\n20,Ulm\n40,Bonn\n"


def write(folder: Path, **texts: str) -> None:
    """Write tables by their names."""
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)


UGLY = "id;seen;age;income;town;class\n" + "".join(
    f"{row};2024-0{1 + row % 9}-11;{'' if row % 5 == 0 else 20 + row % 9};"
    f"1.{row % 900 + 100},50;{('Ulm', 'Bonn', '?')[row % 3]};{'ny'[row % 2]}\n"
    for row in range(160)
)


def load(text: str, tmp_path: Path, **options: Any) -> Dataset:
    path = tmp_path / "ugly.csv"
    path.write_text(text, encoding="utf-8-sig")
    given = {"label": "class", **options}
    return load_dataset(str(path), Request(rng=np.random.RandomState(0), **given))


def test_an_ugly_file_is_understood(tmp_path: Path) -> None:
    """Semicolons, decimal commas, a byte order mark, gaps, ids and dates need no repair."""
    data = load(UGLY, tmp_path)

    assert data.classes == ("n", "y")
    assert data.understood[0].startswith("5 columns beside the label become 8 numbers")
    assert data.understood[1].startswith("numbers (2): age (missing ones marked), income (dec")
    assert data.understood[2:] == (
        "dates (1): seen (month, weekday)",
        "categories (1): town (3)",
        "dropped (1): id (an id)",
    )


def test_rows_to_predict_need_no_label(tmp_path: Path) -> None:
    """They become the numbers that the same rows with labels are."""
    labelled, bare = tmp_path / "labelled.csv", tmp_path / "bare.csv"
    labelled.write_text(UGLY, encoding="utf-8")
    lines = [line.rpartition(";")[0] for line in UGLY.splitlines()]
    bare.write_text("\n".join(lines), encoding="utf-8")
    public = read_public(labelled, ("n", "y"), "class")

    assert read_rows(bare, public).tolist() == public.x.tolist()
    assert read_rows(labelled, public, "class").tolist() == public.x.tolist()


def test_the_header_shows_the_encoding(tmp_path: Path) -> None:
    """Files of older spreadsheets keep their letters."""
    path = tmp_path / "t.csv"
    path.write_text(UGLY.replace("age", "größe"), encoding="cp1252")

    data = load_dataset(str(path), Request(rng=np.random.RandomState(0), label="class"))

    assert "größe" in data.understood[1]


def test_simulation_and_deployment_read_a_table_alike(tmp_path: Path) -> None:
    """The public rows of one are the public file of the other, bit for bit."""
    data = load(UGLY, tmp_path)
    frame = pd.read_csv(tmp_path / "ugly.csv", sep=";", dtype=str, keep_default_na=False)
    order = np.random.RandomState(0).permutation(160)
    frame.iloc[order[:20]].to_csv(tmp_path / "public.csv", sep=";", index=False)
    frame.iloc[order[40:]].to_csv(tmp_path / "mine.csv.gz", index=False)

    public = read_public(tmp_path / "public.csv", ("n", "y"), "class")
    x, y = read_labelled(tmp_path / "mine.csv.gz", public, "class")

    assert public.x.tobytes() == data.x_public.tobytes()
    assert x.tobytes() == data.x_train.tobytes()
    assert y.tolist() == data.y_train.tolist()


def test_no_private_cell_changes_another_row(tmp_path: Path) -> None:
    """Types, categories, scales and widths are those of public rows alone."""
    data = load(UGLY, tmp_path)
    lines = UGLY.splitlines()
    row = int(np.random.RandomState(0).permutation(160)[40])  # the first private one
    lines[1 + row] = f"abc;never;old;lots;Kiel;{'ny'[row % 2]}"
    changed = load("\n".join(lines), tmp_path)

    assert changed.understood == data.understood
    assert changed.x_public.tobytes() == data.x_public.tobytes()
    assert changed.x_train[1:].tobytes() == data.x_train[1:].tobytes()
    assert changed.x_train[0].tobytes() != data.x_train[0].tobytes()


def test_columns_can_be_dropped(tmp_path: Path) -> None:
    """By their names; one that is not there, or the label, is a sentence."""
    data = load(UGLY, tmp_path, drop="town, seen")

    assert data.num_features == 3
    assert "town (asked for)" in data.understood[-1]
    with pytest.raises(
        InvalidParameter, match=r"'twon', which is missing. Did you mean 'town'"
    ):
        load(UGLY, tmp_path, drop="twon")
    with pytest.raises(InvalidParameter, match="drop must be other columns than the label"):
        load(UGLY, tmp_path, drop="class")


def test_a_party_may_drop_a_column_of_its_own(tmp_path: Path) -> None:
    """One that the public file lacks is refused otherwise."""
    write(tmp_path, public=PUBLIC, mine="age,chart,town,label\n20,x,Ulm,n\n")

    with pytest.raises(InvalidData, match=r"got a table with chart \(the setting drop names"):
        read_labelled(tmp_path / "mine.csv", read_public(tmp_path / "public.csv", ("n", "y")))
    public = read_public(tmp_path / "public.csv", ("n", "y"), drop="chart")
    assert read_labelled(tmp_path / "mine.csv", public)[0].tolist() == [[-1, 0, 1]]


def test_words_that_look_like_numbers_stay_words(tmp_path: Path) -> None:
    """A private file of which all codes are digits is read as the public one was."""
    mine = "age,code,label\n1,01,NA\n2,,b\n2,2,b\n"
    write(tmp_path, public="code,age\n01,1\n2,2\nA,4\n", mine=mine)
    public = read_public(tmp_path / "public.csv", ("NA", "b"))

    x, y = read_labelled(tmp_path / "mine.csv", public)

    assert x[:, :3].tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (range(160), r"'class' with 160 different numbers. .*task=numbers.* pandas.qcut\("),
        (np.arange(160) / 7, "different numbers, not all of them whole"),
        ([f"c{row}" for row in range(160)], "'class' with 160 different texts in 160 rows"),
    ],
)
def test_a_label_that_is_no_class_is_questioned(
    tmp_path: Path, labels: Any, message: str
) -> None:
    """Numbers to predict and ids are no classes; the sentence says what to do."""
    lines = [f"{row % 7},{label}" for row, label in enumerate(labels)]
    with pytest.raises(InvalidData, match=message):
        load("\n".join(["x,class", *lines]), tmp_path, task="classes")


# Rows without a label


def with_gaps(rows: Collection[int], gap: str = "") -> str:
    header, *lines = UGLY.splitlines()
    cut = [f"{line[:-1]}{gap}" if n in rows else line for n, line in enumerate(lines)]
    return "\n".join([header, *cut])


def test_rows_without_a_label_are_public(tmp_path: Path) -> None:
    """They join the public rows of the others, which have no labels then, and are counted."""
    data = load(with_gaps(range(60)), tmp_path)

    assert [len(data.x_train), len(data.x_public), len(data.x_test)] == [75, 12 + 60, 13]
    assert data.y_public is None
    assert data.classes == ("n", "y")
    assert data.understood[-1] == "without a label (60): 60 are public rows, 0 are dropped"
    assert "as 72 public rows say" in data.understood[0]
    assert [len(y) for y in (data.y_train, data.y_test)] == [75, 13]


def test_rows_without_a_label_are_dropped_where_public_labels_are_needed(
    tmp_path: Path,
) -> None:
    """All that is left is what a file without these rows would give."""
    shorter = "\n".join(line for line in with_gaps(range(60)).splitlines() if line[-1] != ";")
    expected = load(shorter, tmp_path)
    data = load(with_gaps(range(60)), tmp_path, public_labels=True)

    assert data.understood[-1] == "without a label (60): 0 are public rows, 60 are dropped"
    for name in ("x_train", "y_train", "y_public", "x_test"):
        assert np.array_equal(getattr(data, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"strategy": "fedkd"}, False),
        ({"strategy": "fedkd", "public_labels": True}, True),
        ({"strategy": "fedmd", "pretrain_epochs": 2}, True),
        ({"strategy": "fedkt"}, False),
    ],
)
def test_settings_say_whether_labels_of_public_rows_are_needed(
    settings: dict[str, Any], needed: bool
) -> None:
    """Those of the strategy that learn from them."""
    assert Settings.of(**settings).public_labels is needed


def test_the_number_of_public_rows_limits_those_without_a_label(tmp_path: Path) -> None:
    """The rest is dropped and counted."""
    data = load(with_gaps(range(60)), tmp_path, num_public=10)

    assert len(data.x_public) == 10
    kept = int(data.understood[-1].partition(": ")[2].split()[0])
    assert 0 < kept <= 10
    assert data.understood[-1].endswith(f"{kept} are public rows, {60 - kept} are dropped")


@pytest.mark.parametrize(
    ("labels", "classes", "gaps"),
    [("01", ("0", "1"), 40), ("ny", ("NA", "n", "y"), 0)],
    ids=["numbers", "texts"],
)
def test_a_word_for_nothing_is_a_gap_among_numbers_alone(
    tmp_path: Path, labels: str, classes: tuple[str, ...], gaps: int
) -> None:
    """Among texts, NA may be the name of a class."""
    lines = [f"{n % 7},{labels[n % 2] if n % 4 else 'NA'}" for n in range(160)]
    data = load("\n".join(["x,class", *lines]), tmp_path)

    assert data.classes == classes
    assert len(data.x_public) == (15 + 40 if gaps else 20)


def test_a_label_column_without_a_value_is_a_sentence(tmp_path: Path) -> None:
    """It is no column of classes, and with few values it is one of too few rows."""
    with pytest.raises(InvalidData, match="rows with a label must be at least 8 rows, got 5"):
        load(with_gaps(range(155)), tmp_path)
    with pytest.raises(InvalidData, match="got 'class' without a single value"):
        load(with_gaps(range(160)), tmp_path)


@pytest.mark.parametrize("gap", ["", "NA"])
def test_a_party_drops_rows_without_a_label(
    tmp_path: Path, gap: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own log counts them; the party is the one that a file without them makes."""
    write(tmp_path, public=PUBLIC, mine=f"age,town,label\n77,Ulm,n\n20,Bonn,{gap}\n30,Ulm,y\n")
    public = read_public(tmp_path / "public.csv", ("n", "y"))

    x, y = read_labelled(tmp_path / "mine.csv", public)

    assert y.tolist() == [0, 1]
    assert x[:, 2].tolist() == [1, 1]
    assert "mine.csv: 1 rows without a label are dropped." in caplog.text


def test_public_labels_with_gaps_are_not_used(tmp_path: Path) -> None:
    """The rows are public all the same; a label beyond the class list is still refused."""
    path = tmp_path / "public.csv"
    path.write_text("age,label\n20,n\n40,\n")
    assert read_public(path, ("n", "y")).y is None
    assert len(read_public(path, ("n", "y")).x) == 2

    path.write_text("age,label\n20,n\n40,maybe\n")
    with pytest.raises(InvalidData, match="in the class list n, y, got 1 others"):
        read_public(path, ("n", "y"))


def test_a_parquet_file_is_a_table_too(tmp_path: Path) -> None:
    """With types of its own instead of texts."""
    path = tmp_path / "t.parquet"
    frame = public_frame(seen=pd.date_range("2024-01-01", periods=20), ok=[True, False] * 10)
    pd.concat([frame] * 4, ignore_index=True).assign(kind=["a", "b"] * 40).to_parquet(path)

    data = load_dataset(str(path), Request(rng=np.random.RandomState(0), label="kind"))

    assert data.understood[1] == "numbers (2): age, ok"


def test_what_was_understood_is_told(tmp_path: Path) -> None:
    """Columns by kind, classes with their shares, and rows of the parties."""
    path = tmp_path / "ugly.csv"
    path.write_text(UGLY)
    settings = Settings.of(data=str(path), label="class", num_parties=3, partition="iid")

    told = load_federation(settings).describe_data().splitlines()

    assert told[0] == "ugly.csv"
    assert told[-2:] == [
        "  classes: n 50.0 %, y 50.0 %",
        "  rows: 120 private in 3 parties of 40, 20 public, 20 test",
    ]


def test_a_party_asks_what_its_tables_become(tmp_path: Path) -> None:
    """By its node-config alone, and with public facts alone."""
    write(tmp_path, public=PUBLIC, mine="age,town,label\n77,Kiel,n\n")
    config: dict[str, Value] = {
        "partition-id": 0,
        "data-file": str(tmp_path / "mine.csv"),
        "public-file": str(tmp_path / "public.csv"),
        "classes": "n,y",
        "learner": "random-forest",
        "drop": "town",
    }

    assert understood(config) == [
        "2 columns beside the label become 1 numbers, as 2 public rows say",
        "numbers (1): age",
        "dropped (1): town (asked for)",
    ]
    assert build_party(config, run="1").x.shape == (1, 1)


def test_a_check_shows_what_a_run_would_only_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that are no numbers, and labels beyond the class list, counted and not quoted."""
    write(tmp_path, public=PUBLIC, mine="age,town,label\nold,Ulm,n\n30,Ulm,maybe\n")
    (tmp_path / "node.toml").write_text(
        f'partition-id = 0\ndata-file = "{tmp_path / "mine.csv"}"\nclasses = "n,y"\n'
        f'public-file = "{tmp_path / "public.csv"}"\nlearner = "random-forest"\n'
    )

    assert main(["check", str(tmp_path / "node.toml")]) == 0

    shown = [line for line in capsys.readouterr().out.splitlines() if "LOOK AT THIS" in line]
    assert len(shown) == 2
    assert "1 values of column 'age' are not what the public rows have there" in shown[0]
    assert "1 labels are not in the class list n, y, and count as n" in shown[1]


def test_the_page_about_own_data_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python prints what the page says."""
    page = Path(simulations.__file__).parent.parent / "docs" / "own_data.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)

    exec(compile(example, str(page), "exec"), {})  # noqa: S102 - our own page

    (comment,) = re.findall(r"print\(.*# (.*)", example)
    assert capsys.readouterr().out.strip() == comment
