"""Text data sets by name, as numbers: word weights, or the numbers of words in a list.

Which words count is decided by the public texts alone. A vocabulary of the private texts
would be a release of its own: it shows words that a party wrote.
"""

import csv
import lzma
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from fl_strategies._util import Array, IntArray, import_library
from fl_strategies.errors import InvalidData, require, require_data
from simulations.data.files import local_file, unreachable
from simulations.data.splits import Dataset, Request, Rows, halves

Texts: TypeAlias = Sequence[str]

MAX_WEIGHTS: Final = 5_000
MAX_TOKENS: Final = 10_000
TOKENS_PER_TEXT: Final = 64
PADDING: Final = 0
UNKNOWN_WORD: Final = 1
WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """Location and format of a text data set."""

    file: str
    """Compressed CSV file with the columns split, label and text."""
    train: str
    test: str
    """Values of the column `split` for training and test texts; other rows are dropped."""
    classes: tuple[str, ...]
    """Names of labels 0, 1 and so on."""
    origin: str
    as_tokens: bool = False
    """Whether rows are numbers of words rather than word weights."""


def load_texts(name: str, request: Request) -> Dataset:
    """Load a text set; `NAME-tokens` gives word numbers, `NAME` weights of words.

    A random half of the test texts is public. If more public texts are asked for than that,
    they come from the training texts, and all test texts stay what they are.

    Weights are TF-IDF with logarithmic counts over the commonest 5,000 words of the public
    texts, float32 (n, up to 5,000). Word numbers are those of `Vocabulary`, int64 (n, 64).
    """
    source = TEXT_SETS[name]
    texts, y, num_train = _read(name, source, request.data_dir)
    train, public, test = request.limit(_split(num_train, len(texts) - num_train, request))
    own = [[texts[row] for row in rows] for rows in (train, public, test)]
    if request.raw:
        encode: Callable[[Texts], Array] = _as_array
    else:
        encode = Vocabulary(own[1]).encode if source.as_tokens else _word_weights(name, own[1])
    x_train, x_public, x_test = map(encode, own)
    return Dataset(
        name=name,
        classes=source.classes,
        x_train=x_train,
        y_train=y[train],
        x_public=x_public,
        y_public=y[public],
        x_test=x_test,
        y_test=y[test],
    )


class Vocabulary:
    """Numbers of the commonest words of some texts; 0 is no word, 1 any other word.

    Parameters
    ----------
    texts : sequence of str
        The texts that decide which words have a number.
    size : int
        One more than the largest number.

    Examples
    --------
    >>> Vocabulary(["the cat", "The dog"]).encode(["A cat, the cat"], length=5)
    array([[1, 3, 2, 3, 0]])
    """

    def __init__(self, texts: Texts, size: int = MAX_TOKENS) -> None:
        counts = Counter(word for text in texts for word in _words(text))
        commonest_first = sorted(counts, key=lambda word: (-counts[word], word))
        first = UNKNOWN_WORD + 1
        self._numbers = {
            word: number for number, word in enumerate(commonest_first[: size - first], first)
        }

    def encode(self, texts: Texts, length: int = TOKENS_PER_TEXT) -> IntArray:
        """Return the numbers of the first words of every text, (n, length) int64."""
        rows = np.full((len(texts), length), PADDING, dtype=np.int64)
        for row, text in zip(rows, texts, strict=True):
            words = _words(text)[:length]
            row[: len(words)] = [self._numbers.get(word, UNKNOWN_WORD) for word in words]
        return rows


def _as_array(texts: Texts) -> Array:
    return np.array(texts, dtype=object)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _word_weights(name: str, public: Texts) -> Callable[[Texts], Array]:
    """Return what gives the words of texts their weights, by public texts alone."""
    library = import_library(name, "sklearn.feature_extraction.text", "sklearn")
    vectorizer = library.TfidfVectorizer(
        token_pattern=WORD.pattern,
        max_features=MAX_WEIGHTS,
        sublinear_tf=True,
        dtype=np.float32,
    ).fit(public)
    return lambda texts: vectorizer.transform(texts).toarray()


def _split(num_train: int, num_test: int, request: Request) -> Rows:
    train, test = np.arange(num_train), np.arange(num_train, num_train + num_test)
    if request.num_public <= num_test // 2:
        public, rest = halves(num_test, request.rng)
        return train, test[public], test[rest]
    enough = request.num_public < num_train
    rule = f"below {num_train}, the training texts there are"
    require(enough, "load_dataset", "public-rows", rule, request.num_public)
    order = request.rng.permutation(num_train)
    return order[request.num_public :], order[: request.num_public], test


def _read(name: str, source: TextSet, data_dir: str) -> tuple[list[str], IntArray, int]:
    """Return training texts, then test texts; their labels; how many are for training."""
    local = local_file(source.file, data_dir)
    if not local:
        splits = f"{source.train} and {source.test}"
        content = f"the columns split ({splits}), label and text"
        raise unreachable(name, source.file, content, source.origin, offered=False)
    table = _read_columns(local)
    train, test = (
        [(text, label) for split, label, text in table if split == wanted]
        for wanted in (source.train, source.test)
    )
    for wanted, rows in ((source.train, train), (source.test, test)):
        enough = len(rows) >= 2
        require_data(enough, source.file, f"split {wanted}", "at least 2 texts", len(rows))
    texts, labels = zip(*train, *test, strict=True)
    return list(texts), _numbers(source, labels), len(train)


def _read_columns(path: Path) -> list[tuple[str, str, str]]:
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
            table = csv.DictReader(file, restval="")
            return [(row["split"], row["label"], row["text"]) for row in table]
    except KeyError as error:
        message = f"with the columns split, label and text, got no {error.args[0]}"
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, csv.Error) as error:
        message = f"a compressed CSV table, got {error}"
    raise InvalidData(f"{path.name}: the file must be {message}.")


def _numbers(source: TextSet, labels: Sequence[str]) -> IntArray:
    numbers = {str(number): number for number in range(len(source.classes))}
    wrong = [label for label in labels if label not in numbers]
    rule = f"a class number below {len(numbers)}"
    require_data(not wrong, source.file, "label", rule, wrong[:1])
    return np.array([numbers[label] for label in labels], dtype=np.int64)


AG_NEWS: Final = TextSet(
    file="ag_news.csv.xz",
    train="train",
    test="test",
    classes=("World", "Sports", "Business", "Sci/Tech"),
    origin="http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
)
SST2: Final = TextSet(
    file="sst2.csv.xz",
    train="sent_train",
    test="sent_test",
    classes=("negative", "positive"),
    origin="https://nlp.stanford.edu/sentiment",
)
TEXT_SETS: Final[Mapping[str, TextSet]] = MappingProxyType(
    {
        "ag-news": AG_NEWS,
        "ag-news-tokens": replace(AG_NEWS, as_tokens=True),
        "sst2": SST2,
        "sst2-tokens": replace(SST2, as_tokens=True),
    }
)
