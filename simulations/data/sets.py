"""Data sets by name, each split into private, public and test rows.

Nothing here learns from private rows. Scaling and one-hot columns are fixed by the public
rows alone, which everybody holds: a mean over the pooled private rows would be a release
that no privacy analysis of a strategy accounts for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util import Array, IntArray, import_library
from fl_strategies.errors import InvalidParameter, require, require_data
from fl_strategies.learners import check_labels
from fl_strategies.party.party import check_rows
from simulations.data.encoded import Encoding, as_public, encoded
from simulations.data.encoded import check_encoder as check_encoder_name
from simulations.data.files import (
    DATA_VARIABLE,
    cache_folder,
    class_indices,
    flat_rows,
    image_scale,
    local_file,
    picture_rows,
    public_scale,
    read_npz,
    unreachable,
)
from simulations.data.images import DIGITS, IMAGE_SETS, SPLIT_KEYS, load_images
from simulations.data.schema import Schema
from simulations.data.splits import (
    EMBEDDED_TRAIN_SHARE,
    PAPER_TRAIN_SHARE,
    Dataset,
    Request,
    Rows,
    halves,
    split_rows,
)
from simulations.data.tables import (
    FEWEST_ROWS,
    TABLES,
    UNLABELLED,
    TableEncoder,
    dropped,
    label_classes,
    label_texts,
    only_texts,
    read_table,
    require_label,
)
from simulations.data.targets import Targets, are_numbers, is_empty
from simulations.data.texts import TEXT_SETS, load_texts

__all__ = [
    "DATA_VARIABLE",
    "Dataset",
    "Request",
    "check_dataset_name",
    "check_encoder",
    "check_public",
    "check_schema",
    "load_dataset",
]

Loader: TypeAlias = Callable[[str, Request], Dataset]

FILE_SUFFIXES: Final = (".npz", *TABLES)


@dataclass(frozen=True)
class LibsvmFile:
    """A two-class file of the LIBSVM collection and where to find it.

    OpenML's copy holds the collection's training file followed by its test file. The shape
    and the number of positive rows tell that what arrived is the training file.
    """

    file: str
    openml: str
    num_rows: int
    num_features: int
    num_positive: int
    classes: tuple[str, str]


LIBSVM: Final = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
ADULT: Final = LibsvmFile("a9a.npz", "a9a", 32_561, 123, 7_841, ("<=50K", ">50K"))
COD_RNA: Final = LibsvmFile("cod_rna.npz", "codrna", 59_535, 8, 19_845, ("-1", "1"))
LIBSVM_FILES: Final[Mapping[str, LibsvmFile]] = {"adult": ADULT, "cod-rna": COD_RNA}
COLUMNS: Final = ("breast-cancer", "diabetes", *LIBSVM_FILES)
"""Data sets whose rows are neither images nor texts."""


def load_dataset(name: str, request: Request) -> Dataset:
    """Load and split a data set; the same arguments give the same rows everywhere.

    Parameters
    ----------
    name : str
        `digits`, `breast-cancer` or `diabetes`, whose labels are numbers (embedded in
        scikit-learn; 60 % train, 20 % public, 20 % test), `adult` or `cod-rna` (LIBSVM
        training files; 75 %, 12.5 %, 12.5 %, as in the FedKT paper), one of `IMAGE_SETS` (see
        `simulations.data.images`) or of `TEXT_SETS` (see `simulations.data.texts`), or a file:
        `FILE.npz` with x_train, y_train, x_test, y_test and, if half of x_test is not to become
        public, x_public; or `FILE.csv`, also .csv.gz, .csv.xz and .parquet (75 %, 12.5 %,
        12.5 %).
    request : Request

    Returns
    -------
    Dataset
        Digits lie between 0 and 1, images are normalised by constants of their set, columns
        of zeros and ones stay, and other columns are standardised by mean and deviation of
        the public rows.

    Examples
    --------
    >>> digits = load_dataset("digits", Request(rng=np.random.RandomState(0), num_public=50))
    >>> digits.x_train.shape, digits.x_public.shape, digits.x_test.shape
    ((1078, 64), (50, 64), (360, 64))
    """
    check_dataset_name("load_dataset", name)
    check_public("load_dataset", name, request.public, request.joint_classes)
    check_encoder("load_dataset", name, request.encoder, standardise=request.standardise)
    check_schema("load_dataset", name, request.schema, request.encoder, request.drop)
    data = _load(name, request)
    rule = f"auto or classes for {name}, whose labels are classes"
    numeric = data.task == "regression"
    require(numeric or request.task != "numbers", "load_dataset", "task", rule, request.task)
    rule = f"auto or numbers for {name}, whose labels are numbers"
    require(not numeric or request.task != "classes", "load_dataset", "task", rule, "classes")
    encoding = Encoding.of(request.encoder, standardise=request.standardise)
    return encoded(data, encoding) if encoding else data


def _load(name: str, request: Request) -> Dataset:
    if name in LOADERS:
        return LOADERS[name](name, request)
    if not Path(name).is_file():
        raise InvalidParameter(f"load_dataset: data must be a file that exists, got {name!r}.")
    if request.schema:
        return _load_declared(Path(name), Schema.load(request.schema), request)
    return (_load_npz if name.endswith(".npz") else _load_table)(Path(name), request)


def check_dataset_name(owner: str, name: str) -> None:
    """Raise `InvalidParameter` unless `name` is a known data set or looks like a file."""
    if name not in LOADERS and not name.endswith(FILE_SUFFIXES):
        raise InvalidParameter(
            f"{owner}: data must be one of {', '.join(LOADERS)}, or a file "
            f"({', '.join(FILE_SUFFIXES)}), got {name!r}."
        )


def check_encoder(owner: str, data: str, encoder: str, *, standardise: bool) -> None:
    """Raise `InvalidParameter` unless data are images or texts, if an encoder is named."""
    check_encoder_name(owner, encoder, standardise=standardise)
    rule = f"omitted for {data}, whose rows are columns"
    require(not encoder or data not in COLUMNS, owner, "encoder", rule, encoder)


def check_schema(owner: str, data: str, schema: str, encoder: str, drop: str) -> None:
    """Raise `InvalidParameter` unless a schema, if there is one, can say what columns are."""
    if schema:
        rule = f"omitted unless data is a table ({', '.join(TABLES)})"
        require(data.endswith(TABLES), owner, "schema", rule, schema)
        for key, value in (("encoder", encoder), ("drop", drop)):
            rule = "omitted with a schema, which lists the columns to use"
            require(not value, owner, key, rule, value)


def check_public(owner: str, name: str, public: str, joint_classes: bool) -> None:
    """Raise `InvalidParameter` unless `public` is empty or fits the data set `name`."""
    rule = "false unless public names another image set"
    require(bool(public) or not joint_classes, owner, "joint-classes", rule, joint_classes)
    if not public:
        return
    known = ", ".join(IMAGE_SETS)
    is_known = name in IMAGE_SETS and public in IMAGE_SETS
    require(is_known, owner, "public", f"empty, or with data one of {known}", public)
    other = IMAGE_SETS[name].file != IMAGE_SETS[public].file
    require(other, owner, "public", f"of another file than {name}", public)


# Tables


def _scaled(name: str, x: Array, y: Array, classes: tuple[str, ...], rows: Rows) -> Dataset:
    check_rows(name, "the public rows", x[rows[1]])
    return _dataset(name, public_scale(x[rows[1]])(x), y, classes, rows)


def _dataset(name: str, x: Array, y: Array, classes: tuple[str, ...], rows: Rows) -> Dataset:
    train, public, test = rows
    return Dataset(
        name=name,
        classes=classes,
        x_train=x[train],
        y_train=y[train],
        x_public=x[public],
        y_public=y[public],
        x_test=x[test],
        y_test=y[test],
    )


def _load_embedded(name: str, request: Request) -> Dataset:
    """Load a set that comes with scikit-learn; pixels of digits lie between 0 and 1."""
    library = import_library(name, "sklearn.datasets", "sklearn")
    data = getattr(library, f"load_{name.replace('-', '_')}")()
    x, y = data.data, data.target.astype(np.int64)
    rows = request.limit(split_rows(len(x), EMBEDDED_TRAIN_SHARE, request.rng))
    if name == "digits":
        return _dataset(name, (x / 16).astype(np.float32), y, DIGITS, rows)
    return _scaled(name, x, y, tuple(map(str, data.target_names)), rows)


def _load_diabetes(name: str, request: Request) -> Dataset:
    """Load 442 patients with ten columns and how far their diabetes has progressed."""
    library = import_library(name, "sklearn.datasets", "sklearn")
    data = library.load_diabetes(scaled=False)
    rows = request.limit(split_rows(len(data.data), EMBEDDED_TRAIN_SHARE, request.rng))
    y = data.target[:, np.newaxis].astype(np.float64)
    found = _scaled(name, data.data, y, ("progression",), rows)
    public = y[rows[1]]
    ends = float(public.min()), float(public.max())
    return replace(found, task="regression", target_range=ends)


def _load_libsvm(name: str, request: Request) -> Dataset:
    source = LIBSVM_FILES[name]
    local = local_file(source.file, request.data_dir)
    if local:
        arrays = read_npz(local, "x_train", "y_train")
        x, y = flat_rows(source.file, "x_train", arrays["x_train"]), arrays["y_train"]
    else:
        x, y = _fetch_libsvm(name, source)
    check_labels(source.file, "y_train", y, len(x), num_classes=2)
    rows = request.limit(split_rows(len(x), PAPER_TRAIN_SHARE, request.rng))
    return _scaled(name, x, y.astype(np.int64), source.classes, rows)


def _fetch_libsvm(name: str, source: LibsvmFile) -> tuple[Array, IntArray]:
    """Download the training file from OpenML through scikit-learn."""
    library = import_library(name, "sklearn.datasets", "sklearn")
    try:
        data = library.fetch_openml(
            source.openml, version=1, as_frame=False, data_home=str(cache_folder())
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise unreachable(name, source.file, "x_train, y_train", LIBSVM) from error
    x = data.data[: source.num_rows]
    x = np.asarray(x.toarray() if hasattr(x, "toarray") else x, dtype=np.float32)
    y = (data.target[: source.num_rows].astype(np.float64) > 0).astype(np.int64)
    expected = (source.num_rows, source.num_features, source.num_positive)
    require_data(
        (*x.shape, y.sum()) == expected,
        name,
        "the OpenML copy",
        "{} rows x {} columns with {} positive".format(*expected),
        "{} x {} with {}".format(*x.shape, y.sum()),
    )
    return x, y


# Files


def _load_npz(path: Path, request: Request) -> Dataset:
    arrays = read_npz(path, *SPLIT_KEYS, optional=("x_public",))
    pools = _pools(path.name, arrays, raw=request.raw)
    classes, (y_train, y_test) = class_indices(
        path.name, ("y_train", arrays["y_train"]), ("y_test", arrays["y_test"])
    )
    own = "x_public" in pools
    pools.setdefault("x_public", pools["x_test"])
    public, test = np.arange(len(pools["x_public"])), np.arange(len(pools["x_test"]))
    if not own:
        public, test = halves(len(test), request.rng)
        rule = "at least 2 rows without x_public"
        require_data(len(public) > 0, path.name, "x_test", rule, 1)
    rows = np.arange(len(pools["x_train"])), public, test
    train, public, test = request.limit(rows)
    x_public = pools["x_public"][public]
    if request.raw:
        scale: Callable[[Array], Array] = partial(as_public, path.name, x_public)
    else:
        check_rows(path.name, "x_public" if own else "x_test", x_public)
        scale = (image_scale if arrays["x_train"].ndim > 2 else public_scale)(x_public)
    return Dataset(
        name=path.name,
        classes=classes,
        x_train=scale(pools["x_train"][train]),
        y_train=y_train[train],
        x_public=scale(x_public),
        y_public=None if own else y_test[public],
        x_test=scale(pools["x_test"][test]),
        y_test=y_test[test],
    )


def _pools(owner: str, arrays: Mapping[str, Array], *, raw: bool) -> dict[str, Array]:
    """Return the rows of an archive by their keys; raise unless they and their labels fit."""
    pools = {
        key: x if raw else picture_rows(owner, key, x)
        for key, x in arrays.items()
        if key[0] == "x"
    }
    shape = pools["x_train"].shape[1:]
    for key, x in pools.items():
        expected, got = math.prod(shape), math.prod(x.shape[1:])
        require_data(expected == got, owner, key, f"{expected} values a row like x_train", got)
        require_data(x.shape[1:] == shape, owner, key, f"rows of shape {shape}", x.shape[1:])
        if key != "x_public":
            name = key.replace("x", "y", 1)
            y, rule = arrays[name], f"{len(x)} labels, one for each row of {key}"
            matched = y.ndim > 0 and len(x) == len(y)
            require_data(matched, owner, name, rule, f"shape {y.shape}")
    return pools


def _load_table(path: Path, request: Request) -> Dataset:
    table = read_table(path)
    columns = [str(name) for name in table.columns]
    label = request.label
    require_label(path.name, label, columns)
    unused = dropped(path.name, request.drop, columns, label)
    column = table.pop(label)
    targets = _numeric(path.name, column, request)
    if targets is not None:
        return _load_numbers(path.name, table, targets, label_texts(column), unused, request)
    classes, y = label_classes(path.name, label, column)
    rows = request.limit(_rows_of_table(y == UNLABELLED, request))
    if request.raw:
        texts = only_texts(path.name, table.drop(columns=[*unused], errors="ignore"))
        data = _dataset(path.name, texts, y, classes, rows)
        unlabelled = bool((y[rows[1]] == UNLABELLED).any())
        return replace(data, y_public=None) if unlabelled else data
    encoder = TableEncoder.learn(path.name, table.iloc[rows[1]], unused)
    data = _dataset(path.name, encoder.encode(path.name, table), y, classes, rows)
    missing, public = (int((part == UNLABELLED).sum()) for part in (y, y[rows[1]]))
    understood = encoder.describe()
    if missing:
        used = f"{public} are public rows, {missing - public} are dropped"
        understood.append(f"without a label ({missing}): {used}")
    y_public = None if public else data.y_public
    return replace(data, y_public=y_public, understood=tuple(understood))


def _load_declared(path: Path, schema: Schema, request: Request) -> Dataset:
    table = read_table(path)
    require_label(path.name, schema.label_name(request.label), [*map(str, table.columns)])
    column, targets = table.pop(schema.label.name), schema.targets
    y: Array
    if targets is None:
        y = schema.class_indices(column, path.name)
        gaps, strange = y == UNLABELLED, np.zeros(len(y), dtype=bool)
    else:
        words = label_texts(column)
        gaps, strange = is_empty(words), np.isnan(targets.numbers(words))
        y = targets.read(path.name, words)
    train, public, test = _rows_of_table(gaps, request)
    if request.without_public:
        train, public = np.concatenate([train, public[~gaps[public]]]), public[:0]
    rows = request.limit((train, public, test[~strange[test]]))
    x = schema.encode(table, path.name)
    classes = schema.label.classes or (schema.label.name,)
    data = _dataset(path.name, x, y, classes, rows)
    missing, unlabelled = int(gaps.sum()), int(gaps[rows[1]].sum())
    understood = schema.describe(Path(request.schema).name)
    if missing:
        understood.append(f"without a label of the schema ({missing}): {unlabelled} are public")
    return replace(
        data,
        y_public=None if unlabelled or not len(data.x_public) else data.y_public,
        understood=tuple(understood),
        task="single-label" if targets is None else "regression",
        encoding=schema.hash,
        schema=schema,
    )


def _numeric(owner: str, column: Any, request: Request) -> Targets | None:
    """Return what a label column's numbers are by its public ones; None for classes."""
    if request.task == "classes":
        return None
    words = label_texts(column)
    unlabelled = is_empty(words)
    if request.task == "auto" and (~unlabelled).sum() < FEWEST_ROWS:
        return None
    # The split of these very rows if they turn out to be numbers, and no trace if not.
    twin = replace(request, rng=deepcopy(request.rng))
    _, public, _ = twin.limit(_rows_of_table(unlabelled, twin))
    if request.task == "auto" and not are_numbers(words[public]):
        return None
    return Targets.learn(owner, request.label, words[public])


def _load_numbers(
    owner: str,
    table: Any,
    targets: Targets,
    words: Array,
    unused: Sequence[str],
    request: Request,
) -> Dataset:
    """Return a table whose labels are numbers to predict."""
    empty, strange = is_empty(words), np.isnan(targets.numbers(words))
    train, public, test = request.limit(_rows_of_table(empty, request))
    # Nothing is measured on a target that nobody can read.
    rows = train, public, test[~strange[test]]
    y, understood = targets.read(owner, words), [targets.describe()]
    if request.raw:
        x = only_texts(owner, table.drop(columns=[*unused], errors="ignore"))
    else:
        encoder = TableEncoder.learn(owner, table.iloc[public], unused)
        x, understood = encoder.encode(owner, table), [*encoder.describe(), *understood]
    data = _dataset(owner, x, y, (targets.label,), rows)
    if missing := int(empty.sum()):
        used = int(empty[public].sum())
        understood.append(
            f"without a label ({missing}): {used} are public rows, {missing - used} are dropped"
        )
    return replace(
        data,
        task="regression",
        y_public=None if empty[public].any() else data.y_public,
        target_range=(targets.low, targets.high),
        understood=tuple(understood),
    )


def _rows_of_table(unlabelled: Array, request: Request) -> Rows:
    """Split the rows that have a label; the others are public, unless labels are needed."""
    labelled = np.flatnonzero(~unlabelled)
    parts = split_rows(len(labelled), PAPER_TRAIN_SHARE, request.rng, "rows with a label")
    train, public, test = (labelled[part] for part in parts)
    if not request.public_labels:
        public = np.concatenate([public, np.flatnonzero(unlabelled)])
    return train, public, test


LOADERS: Final[Mapping[str, Loader]] = MappingProxyType(
    {
        **dict.fromkeys(("digits", "breast-cancer"), _load_embedded),
        "diabetes": _load_diabetes,
        **dict.fromkeys(LIBSVM_FILES, _load_libsvm),
        **dict.fromkeys(IMAGE_SETS, load_images),
        **dict.fromkeys(TEXT_SETS, load_texts),
    }
)
