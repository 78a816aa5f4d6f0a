"""Data sets, own files and deployed parties whose rows a frozen encoder makes."""

import csv
import io
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from clients import Encoder, client_app, find_encoder
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import InvalidData, InvalidParameter, RunFailed
from simulations.config import Settings, Value
from simulations.data.encoded import FOLDER, Encoding, as_public, encode_parts
from simulations.data.files import cache_folder
from simulations.data.sets import DATA_VARIABLE, Dataset, Request, load_dataset
from simulations.deploy import server_app
from simulations.deploy.client_app import build_party, understood
from simulations.deploy.data import read_public, read_rows
from simulations.federation import load_federation
from simulations.runtime.local import run_local, run_once

ASKED: list[Any] = []
DAMAGED = 77
"""Value of all pixels of an image that cannot be encoded."""


def size(record: Any) -> list[float]:
    """Return two numbers of a text or an image; refuse what is called damaged."""
    ASKED.append(record)
    if isinstance(record, str):
        if record == "damaged":
            raise ValueError(record)
        return [len(record), record.count("good")]
    if (record == DAMAGED).all():
        raise ValueError("damaged")
    return [record.min(), record.max()]


SIZES = Encoder.of(size, "sizes", version="1")
NAME = f"{__name__}:SIZES"


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide data folders and caches of the machine."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ASKED.clear()


def load(name: str, *, seed: int = 0, encoder: str = NAME, **options: Any) -> Dataset:
    rng = np.random.RandomState(seed)
    return load_dataset(name, Request(rng=rng, encoder=encoder, **options))


def images(number: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(number, 8, 8), dtype=np.uint8)


def labels(number: int) -> Array:
    return (np.arange(number) % 4).astype(np.uint8)


def sizes_of(records: Any) -> FloatArray:
    return np.array([size(record) for record in records], dtype=np.float32)


@pytest.fixture
def mnist(tmp_path: Path) -> str:
    """Write a small file of that name; return its folder."""
    np.savez(
        tmp_path / "mnist.npz",
        x_train=images(40),
        y_train=labels(40),
        x_test=images(20, 1),
        y_test=labels(20),
    )
    return str(tmp_path)


def test_images_are_encoded_as_bytes(mnist: str) -> None:
    """By no constant of the set, and in the order of their labels."""
    data = load("mnist", data_dir=mnist)

    assert {record.dtype for record in ASKED} == {np.dtype(np.uint8)}
    assert np.array_equal(data.x_train, sizes_of(images(40)[..., None]))
    assert data.y_train.tolist() == labels(40).tolist()
    together = np.concatenate([data.x_public, data.x_test])
    assert sorted(map(tuple, together)) == sorted(map(tuple, sizes_of(images(20, 1))))
    assert data.encoding == SIZES.hash
    told = f"sizes (hash {SIZES.hash[:12]}) makes 2 numbers of each record"
    assert data.understood == (told,)


def test_another_split_finds_the_records_in_the_same_file(mnist: str) -> None:
    """Each record is encoded once, whatever part it is in."""
    first = load("mnist", data_dir=mnist)
    assert len(ASKED) == 60

    other = load("mnist", data_dir=mnist, seed=1)
    assert len(ASKED) == 60
    assert not np.array_equal(first.x_test, other.x_test)
    assert len([*(cache_folder() / FOLDER).iterdir()]) == 1

    rows = encode_parts(SIZES, (images(3), images(3)), cache_folder() / FOLDER)
    assert len(ASKED) == 63
    assert np.array_equal(rows[0], sizes_of(images(3)))
    assert np.array_equal(rows[0], rows[1])


def test_columns_can_be_standardised_by_public_rows(mnist: str) -> None:
    """As columns of tables are; it is another encoding."""
    plain, data = load("mnist", data_dir=mnist), load("mnist", data_dir=mnist, standardise=True)

    assert data.x_public.mean(axis=0) == pytest.approx([0, 0], abs=1e-5)
    mean, deviation = plain.x_public.mean(axis=0), plain.x_public.std(axis=0)
    assert data.x_train == pytest.approx((plain.x_train - mean) / deviation, abs=1e-4)
    assert data.encoding == f"{SIZES.hash}+standardised"
    assert data.understood[0].endswith("of each record, standardised")


def test_texts_are_encoded_as_texts(tmp_path: Path) -> None:
    """In place of word weights and of word numbers."""
    rows = [
        (split, number % 2, f"{'good ' * (number % 2)}film {number}")
        for split in ("sent_train", "sent_test")
        for number in range(12)
    ]
    buffer = io.StringIO()
    csv.writer(buffer).writerows([("split", "label", "text"), *rows])
    (tmp_path / "sst2.csv.xz").write_bytes(lzma.compress(buffer.getvalue().encode()))

    for name in ("sst2", "sst2-tokens"):
        data = load(name, data_dir=str(tmp_path))
        assert np.array_equal(data.x_train, sizes_of([text for *_, text in rows[:12]]))
        assert data.x_train[:, 1].tolist() == data.y_train.tolist()


def test_own_archives_hold_raw_records(tmp_path: Path) -> None:
    """Images, of which a fraction in another part changes none, or texts."""
    arrays: dict[str, Any] = {
        "x_train": images(16),
        "x_test": images(16, 1).astype(np.float64) + 0.25,
        "x_public": images(8, 2),
    }
    given = {**arrays, "y_train": labels(16), "y_test": labels(16)}
    np.savez(tmp_path / "own.npz", **given)
    data = load(str(tmp_path / "own.npz"))
    assert np.array_equal(data.x_train, sizes_of(images(16)))
    assert np.array_equal(data.x_test, sizes_of(images(16, 1)))

    words = {
        key: np.array([f"text {x.sum():.0f}" for x in value]) for key, value in arrays.items()
    }
    np.savez(tmp_path / "texts.npz", **{**given, **words})
    data = load(str(tmp_path / "texts.npz"))
    assert np.array_equal(data.x_train, sizes_of(words["x_train"].tolist()))


def test_own_tables_have_one_column_of_texts(tmp_path: Path) -> None:
    """Beside the label; rows without a label are public."""
    path = tmp_path / "films.csv"
    lines = [f"{n},film {n},{('good', 'dull', '')[n % 3]}" for n in range(60)]
    path.write_text("\n".join(["id,text,label", *lines]))

    data = load(str(path), label="label", drop="id")

    assert data.y_public is None
    assert len(data.x_public) == 20 + 5
    assert {*data.x_train[:, 0]} == {len("film 1"), len("film 10")}
    with pytest.raises(InvalidData, match="columns must be one beside the label with an encod"):
        load(str(path), label="label")


def test_a_record_that_cannot_be_encoded_has_the_public_median(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A private one; if it is public, everybody sees what is wrong with it."""
    words = np.array([f"text {'good' * n}" for n in range(24)])
    for key in ("x_train", "x_public"):
        arrays: dict[str, Any] = {"x_train": words, "x_test": words, "x_public": words}
        arrays[key] = np.where(np.arange(24) == 5, "damaged", words)
        given = {**arrays, "y_train": labels(24), "y_test": labels(24)}
        np.savez(tmp_path / f"{key}.npz", **given)

    data = load(str(tmp_path / "x_train.npz"))
    assert data.x_train[5].tolist() == np.median(data.x_public, axis=0).tolist()
    assert "1 of 25 records are no rows" in caplog.text
    with pytest.raises(InvalidData, match="the encoded public rows must be finite"):
        load(str(tmp_path / "x_public.npz"))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"data": "adult"}, "encoder must be omitted for adult, whose rows are columns"),
        ({"encoder": "scatering"}, "encoder must be one of scattering, efficientnet-lite0"),
        ({"encoder": "", "standardise": True}, "standardise must be false without encoder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], rule: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(InvalidParameter, match=f"Settings: {rule}"):
        Settings.of(**{"encoder": "scattering", **given})


@pytest.mark.parametrize("strategy", ["fedkd", "fedhistogram"])
def test_a_run_on_scattered_digits(strategy: str) -> None:
    """Its parties and its server have the encoder's hash; the result is above chance by far."""
    settings = Settings.of(
        strategy=strategy,
        encoder="scattering",
        num_parties=3,
        train_rows=300,
        public_rows=100,
        learner="extra-trees",
        num_trees=10,
        solo=False,
        pooled=False,
        num_workers=1,
    )
    federation = load_federation(settings)
    ours = find_encoder("scattering").hash

    assert federation.dataset.row_shape == (324,)
    assert federation.party(1).encoding == ours
    assert federation.strategy().encoding == ours
    assert "scattering (hash" in federation.describe_data()
    assert run_once(settings)["accuracy"] > 0.75


# Deployed


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write raw images: brighter ones are of the second class."""
    for number, name in enumerate(("public", "party-0", "party-1")):
        y = np.arange(40) % 2
        x = (images(40, number) // 2 + 100 * y[:, None, None]).astype(np.uint8)
        folder = tmp_path / name
        folder.mkdir()
        np.savez(folder / "data.npz", x=x, y=np.array(["dark", "bright"])[y])
    return tmp_path


def node(files: Path, number: int, **more: Value) -> dict[str, Value]:
    return {
        "partition-id": number,
        "num-partitions": 2,
        "data-file": str(files / f"party-{number}" / "data.npz"),
        "public-file": str(files / "public" / "data.npz"),
        "classes": "dark,bright",
        "learner": "extra-trees",
        "allow-unprotected": True,
        "encoder": "scattering",
        **more,
    }


def run_deployed(files: Path, nodes: Mapping[int, dict[str, Value]], **more: Value) -> Any:
    run: dict[str, Value] = {
        "strategy": "fedkd",
        "public-file": str(files / "public" / "data.npz"),
        "test-file": str(files / "party-1" / "data.npz"),
        "classes": "dark,bright",
        "num-parties": 2,
        "max-wait": 0.1,
        "final-learner": "extra-trees",
        **more,
    }
    federation = server_app.load(run)
    strategy = federation.strategy()

    def load_party(context: Context) -> Any:
        return build_party(nodes[int(context.node_config["partition-id"])], run="1")

    try:
        run_local(strategy, client_app(load_party), 2)
    except RunFailed:
        return federation, strategy
    return federation, strategy


def test_a_deployed_federation_encodes_its_files(files: Path) -> None:
    """Server and parties name the same encoder, and keep rows beside their own files."""
    nodes = {number: node(files, number) for number in range(2)}
    federation, strategy = run_deployed(files, nodes, encoder="scattering")

    assert not strategy.rejected_
    assert federation.quality(strategy.model_) > 0.9
    assert federation.dataset.understood[0].startswith("scattering (hash")
    for name in ("public", "party-0", "party-1"):
        assert len([*(files / name / "encoded").iterdir()]) == 1
    party = build_party(nodes[0], run="1")
    expected = find_encoder("scattering").encode(np.load(nodes[0]["data-file"])["x"])  # type: ignore[arg-type]
    assert party.x.tobytes() == expected.tobytes()
    assert understood(nodes[0]) == [*federation.dataset.understood]


@pytest.mark.parametrize(
    ("server", "party", "shown"),
    [
        ({"encoder": "scattering"}, {"encoder": ""}, "got none"),
        ({}, {}, r"the server's \(none\)"),
        ({"encoder": "scattering"}, {"encoder": NAME}, f"got hash '{SIZES.hash[:12]}'"),
        ({"encoder": "scattering"}, {"standardise": True}, "got hash"),
    ],
)
def test_a_node_with_another_encoder_refuses(
    files: Path, server: dict[str, Value], party: dict[str, Value], shown: str
) -> None:
    """One sentence says so; the other party is not affected."""
    nodes = {0: node(files, 0, **party), 1: node(files, 1, **server)}
    if not server:
        nodes[1]["encoder"] = ""
    _, strategy = run_deployed(files, nodes, **{"min-parties": 1, **server})

    (reason,) = strategy.rejected_.values()
    assert "encoding must be the server's" in reason
    assert shown.replace("\\", "") in reason
    assert "the same encoder, in the same version, or none to all" in reason


def test_a_deployed_partys_table_holds_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that cannot be encoded is a gap, which the party's own log counts."""
    (tmp_path / "public.csv").write_text("id,text,label\n1,good,a\n2,a good film,b\n")
    (tmp_path / "mine.csv").write_text("id,text,label\n1,damaged,a\n2,so good,b\n")
    public = str(tmp_path / "public.csv")
    party = build_party(
        {
            **node(tmp_path, 0, encoder=NAME, drop="id", classes="a,b"),
            "public-file": public,
            "data-file": str(tmp_path / "mine.csv"),
        },
        run="1",
    )

    assert party.public.tolist() == [[4, 1], [11, 1]]
    assert party.x.tolist() == [[7.5, 1], [7, 1]]
    assert "1 of 2 records are no rows" in caplog.text
    known = read_public(Path(public), ("a", "b"), drop="id", encoding=Encoding(SIZES))
    assert read_rows(tmp_path / "mine.csv", known).tolist() == [[7.5, 1], [7, 1]]


@pytest.mark.parametrize("num_damaged", [1, 39, 40])
def test_a_damaged_record_changes_its_own_row_alone(files: Path, num_damaged: int) -> None:
    """However many others are damaged as well: whether a party answers depends on none."""
    whole = build_party(node(files, 0, encoder=NAME), run="1")
    path = files / "party-0" / "data.npz"
    arrays = dict(np.load(path))
    arrays["x"][40 - num_damaged :] = DAMAGED
    np.savez(path, **arrays)

    party = build_party(node(files, 0, encoder=NAME), run="1")

    assert party.x[: 40 - num_damaged].tobytes() == whole.x[: 40 - num_damaged].tobytes()
    gaps = party.x[40 - num_damaged :]
    assert (gaps == np.median(party.public, axis=0).astype(np.float32)).all()


def test_images_of_another_size_are_refused(files: Path) -> None:
    """With the numbers that both have."""
    np.savez(files / "party-0" / "data.npz", x=images(4)[:, :5, :5], y=["dark"] * 4)

    with pytest.raises(InvalidData, match=r"records must be of 324 encoded numbers .*, got 81"):
        build_party(node(files, 0), run="1")


def test_records_are_read_in_the_public_type(caplog: pytest.LogCaptureFixture) -> None:
    """One fraction or gap among bytes leaves all others what they are; the log says so."""
    given = images(3).astype(np.float64)
    given[1, 0, 0] = np.nan
    given[1, 0, 1] = 1e9
    given[2, 0, 0] += 0.3

    read = as_public("own.npz", images(1), given)

    assert read.dtype == np.uint8
    assert "own.npz: records are float64 where public ones are uint8, as which" in caplog.text
    assert np.array_equal(read[[0, 2]], images(3)[[0, 2]])
    assert read[1, 0, :2].tolist() == [0, 255]
    assert as_public("own.npz", images(1) / 255, given.astype(np.float32)).dtype == np.float64
    assert as_public("own.npz", images(1) > 9, images(2)).dtype == np.bool
    assert as_public("own.npz", np.array(["a"]), np.array(["b"], dtype=object)).tolist() == [
        "b"
    ]
