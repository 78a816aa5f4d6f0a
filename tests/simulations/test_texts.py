import csv
import io
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidData, InvalidParameter, MissingExtra
from simulations.data.sets import DATA_VARIABLE, Dataset, Request, load_dataset
from simulations.data.texts import MAX_TOKENS, TEXT_SETS, Vocabulary

REAL_DATA = os.environ.get(DATA_VARIABLE, "")
TOPICS = ("war treaty minister", "goal match coach", "market shares bank", "robot chip code")


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide data folders of the machine."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def write_table(
    path: Path, rows: list[tuple[Any, ...]], header: str = "split,label,text"
) -> None:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([header.split(","), *rows])
    path.write_bytes(lzma.compress(buffer.getvalue().encode()))


def news(num_train: int = 40, num_test: int = 20) -> list[tuple[Any, ...]]:
    """Return texts that end with a word of their own: mine17 is that of row 17."""
    rows = []
    for number in range(num_train + num_test):
        split = "train" if number < num_train else "test"
        rows.append((split, number % 4, f'{TOPICS[number % 4]}, "The" mine{number}'))
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with small files of both sets."""
    write_table(tmp_path / "ag_news.csv.xz", news())
    sentences = [
        (split, number % 2, f"{'good' if number % 2 else 'bad'} film {number}")
        for split in ("phrase_train", "sent_train", "sent_dev", "sent_test")
        for number in range(12)
    ]
    write_table(tmp_path / "sst2.csv.xz", sentences)
    return tmp_path


def load(folder: Path, name: str, seed: int = 0, **options: Any) -> Dataset:
    rng = np.random.RandomState(seed)
    return load_dataset(name, Request(rng=rng, data_dir=str(folder), **options))


def sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.x_train), len(data.x_public), len(data.x_test)


@pytest.mark.parametrize("name", TEXT_SETS)
def test_texts_become_rows_of_numbers(folder: Path, name: str) -> None:
    """Weights are float32, word numbers int64; labels belong to the class list.

    Phrases and the development part of SST-2 are neither private nor public.
    """
    data = load(folder, name)
    dtype = np.int64 if name.endswith("-tokens") else np.float32
    for x in (data.x_train, data.x_public, data.x_test):
        assert x.dtype == dtype
        assert x.shape[1:] == data.row_shape
    assert set(np.unique(data.y_train)) == set(range(data.num_classes))
    assert data.y_public is not None
    assert len(data.y_public) == len(data.x_public)
    assert sizes(data) == ((12, 6, 6) if name.startswith("sst2") else (40, 10, 10))


def test_rows_keep_their_labels(folder: Path) -> None:
    """Texts of one topic share words that texts of other topics lack."""
    data = load(folder, "ag-news-tokens", seed=3)
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        first_words = [{row[0] for row in x[y == topic]} for topic in range(4)]
        assert [len(words) for words in first_words] == [1] * 4
        assert len(set.union(*first_words)) == 4


def test_private_words_have_no_number_and_no_column(folder: Path) -> None:
    """Only words of public texts count: 12 topic words, "the", and one word a public text."""
    assert load(folder, "ag-news").num_features == 12 + 1 + 10
    data = load(folder, "ag-news-tokens")
    assert (data.x_train[:, 4] == 1).all()
    assert (data.x_test[:, 4] == 1).all()
    assert len(set(data.x_public[:, 4].tolist()) - {1}) == 10


def test_weights_of_a_text_have_length_one(folder: Path) -> None:
    """Rows of word weights are unit vectors without negative entries."""
    data = load(folder, "ag-news")
    assert np.allclose(np.linalg.norm(data.x_train, axis=1), 1, atol=1e-5)
    assert data.x_train.min() >= 0


def test_many_public_texts_come_from_the_training_texts(folder: Path) -> None:
    """More than half of the test texts asked for: these stay, and private ones get fewer."""
    data = load(folder, "ag-news-tokens", num_public=15)
    assert sizes(data) == (25, 15, 20)
    limited = load(folder, "ag-news-tokens", num_public=10)
    assert sizes(limited) == (40, 10, 10)
    own = {row.tobytes() for row in data.x_public}
    assert len(own) == 15


def test_a_vocabulary_of_fewer_public_texts_is_smaller(folder: Path) -> None:
    """Public texts that were not taken do not decide about words."""
    data = load(folder, "ag-news", num_public=4, num_train=8, num_test=3)
    assert sizes(data) == (8, 4, 3)
    assert data.num_features <= 12 + 1 + 4


def test_the_seed_decides_the_public_texts(folder: Path) -> None:
    """Equal seeds give equal rows and another seed gives others."""
    first, again, other = (load(folder, "ag-news-tokens", seed) for seed in (1, 1, 2))
    assert np.array_equal(first.x_public, again.x_public)
    assert np.array_equal(first.x_train, again.x_train)
    assert not np.array_equal(first.y_test, other.y_test)


def test_more_public_texts_than_there_are_is_refused(folder: Path) -> None:
    """Some training text must stay private."""
    message = "public-rows must be below 40, the training texts there are, got 40"
    with pytest.raises(InvalidParameter, match=message):
        load(folder, "ag-news", num_public=40)


# Vocabulary


def test_commoner_words_have_smaller_numbers() -> None:
    """Number 2 is the commonest word, ties go by the alphabet, case does not count.

    Only the first words of a text have a place.
    """
    encode = Vocabulary(["b a a", "A b c", "d"]).encode
    assert encode(["a b c d e", ""], length=6).tolist() == [[2, 3, 4, 5, 1, 0], [0] * 6]
    assert encode(["a b a a"], length=2).tolist() == [[2, 3]]


@settings(deadline=None, max_examples=30)
@given(
    texts=st.lists(st.text(max_size=40), max_size=8),
    size=st.integers(2, 12),
    length=st.integers(1, 9),
)
def test_numbers_stay_below_the_size_of_the_vocabulary(
    texts: list[str], size: int, length: int
) -> None:
    """Any text of any script gives a row of the right length within the embedding."""
    rows = Vocabulary(texts, size).encode([*texts, "word"], length)
    assert rows.shape == (len(texts) + 1, length)
    assert rows.dtype == np.int64
    assert rows.min() >= 0
    assert rows.max() < size


# Files that are missing or wrong


@pytest.mark.parametrize("name", TEXT_SETS)
def test_a_missing_file_says_what_is_needed(tmp_path: Path, name: str) -> None:
    """The answer names file, columns and the source of the texts."""
    source = TEXT_SETS[name]
    message = (
        rf"{name} must be in a local folder, got none\. .*{source.file} with the columns split "
        rf"\({source.train} and {source.test}\), label and text\. The data come from http"
    )
    with pytest.raises(InvalidData, match=message):
        load(tmp_path, name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"plain text", ""),
        (lzma.compress(b"\xff\xfe,\xff")[:-3], ""),
        (b"", ""),
        (news(1), "split train must be at least 2 texts, got 1"),
        (news(8, 0), "split test must be at least 2 texts, got 0"),
        ([*news(), ("train", 4, "x")], r"label must be a class number below 4, got \['4'\]"),
        ([*news(), ("train", "sports", "x")], r"label must be .*, got \['sports'\]"),
        ([*news(), ("train",)], r"label must be .*, got \[''\]"),
        ([*news(), ("train", "-1", "x")], r"label must be .*, got \['-1'\]"),
    ],
)
def test_a_wrong_table_is_described(tmp_path: Path, rows: Any, message: str) -> None:
    """No compressed table, missing texts, odd labels, a missing column: one sentence each."""
    path = tmp_path / "ag_news.csv.xz"
    path.write_bytes(rows) if isinstance(rows, bytes) else write_table(path, rows)
    with pytest.raises(InvalidData, match=rf"ag_news.csv.xz: {message}"):
        load(tmp_path, "ag-news")
    write_table(path, news(), header="split,class,text")
    with pytest.raises(InvalidData, match=r"with the columns split, label and text, got no la"):
        load(tmp_path, "ag-news")


def test_weights_without_scikit_learn_name_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word numbers need no library at all."""
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(MissingExtra, match=r"ag-news: .*fl-strategies\[sklearn\]"):
        load(folder, "ag-news")
    assert sizes(load(folder, "ag-news-tokens")) == (40, 10, 10)


@pytest.mark.skipif(not REAL_DATA, reason="needs FL_STRATEGIES_DATA")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("ag-news-tokens", (23726, 3800, 3800)), ("sst2-tokens", (6920, 910, 911))],
)
def test_real_texts_are_complete(name: str, expected: tuple[int, int, int]) -> None:
    """All texts are read, and most of their words are known to the public ones."""
    data = load_dataset(name, Request(rng=np.random.RandomState(0), data_dir=REAL_DATA))
    assert sizes(data) == expected
    words = data.x_train[data.x_train > 0]
    assert (words == 1).mean() < 0.35
    assert words.max() < MAX_TOKENS
