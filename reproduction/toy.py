"""A table in seconds: few rows of random data, few parties, one epoch, one seed.

Its figures mean nothing. It shows that the table's settings still run.
"""

import csv
import lzma
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from fl_strategies._util import Array
from reproduction.table import Row, Table
from simulations.config import Settings, Value
from simulations.data.images import DIGITS, FEDMD_CLASSES
from simulations.data.sets import LIBSVM_FILES
from simulations.data.texts import TEXT_SETS

TOY: Final = "toy"
ALWAYS: Final[Mapping[str, Value]] = {
    "train-rows": 90,
    "public-rows": 40,
    "test-rows": 40,
    "min-records": 2,
    "epochs": 1,
    "num-trees": 3,
    "boosting-rounds": 2,
    "num-workers": 1,
}
AT_MOST: Final[Mapping[str, int]] = {
    "num-splits": 1,
    "num-teachers": 2,
    "num-queries": 20,
    "num-public": 30,
    "num-samples": 10,
    "num-predictions": 2,
    "local-epochs": 1,
    "final-learner-epochs": 1,
    "pretrain-epochs": 1,
    "distill-epochs": 1,
}
IF_KNOWN: Final[Mapping[str, int]] = {
    "epochs-initial": 1,
    "epochs-digest": 1,
    "epochs-revisit": 1,
}
MOST_PARTIES: Final = 3
MOST_ROUNDS: Final = 2
TOLD_APART: Final = ("strategy", "data", "public", "learner", "privacy-level", "release")
"""Settings in which two rows must differ to be both of interest."""


def toy(table: Table, folder: Path) -> Table:
    """Return a table with stand-ins for data, and one row of each kind."""
    write_stand_ins(folder)
    kinds: dict[tuple[Value | None, ...], Row] = {}
    for row in table.rows:
        kinds.setdefault(tuple(map(row.settings.get, TOLD_APART)), row)
    rows = tuple(
        replace(row, settings=_toy_settings(row.settings, folder)) for row in kinds.values()
    )
    return replace(table, rows=rows, seeds=table.seeds[:1], scale=TOY)


def _toy_settings(given: Mapping[str, Value], folder: Path) -> dict[str, Value]:
    settings = Settings.from_run_config(given)
    known = settings.options.settings()
    capped = {
        key: min(int(value), most)
        for key, value in given.items()
        if (most := AT_MOST.get(key.rpartition(".")[2])) is not None
    }
    return {
        **given,
        **ALWAYS,
        **capped,
        **{key: value for key, value in IF_KNOWN.items() if key in known},
        "num-parties": min(settings.num_parties, MOST_PARTIES),
        "num-server-rounds": min(settings.num_rounds, MOST_ROUNDS),
        "data-dir": str(folder),
    }


COMPLETE: Final = "README"
NUM_TRAIN: Final = 300
NUM_TEST: Final = 160
GREY: Final = (28, 28)
CHEST: Final = (32, 32)
COLOUR: Final = (32, 32, 3)
LETTERS: Final = tuple("abcdef")
NUM_FINE: Final = 100
NUM_COARSE: Final = 20
FINDINGS: Final = {"nih_cxr14_5k.npz": 14, "covid_cxr.npz": 7}
NUM_PATIENTS: Final = 60
NUM_WORDS: Final = 40


def write_stand_ins(folder: Path) -> None:
    """Write a file for every data set that has one, always the same, unless they are there."""
    if (folder / COMPLETE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, arrays in _archives(rng).items():
        np.savez(folder / name, **arrays)  # type: ignore[arg-type]
    for source in {text.file: text for text in TEXT_SETS.values()}.values():
        splits = [(source.train, NUM_TRAIN), (source.test, NUM_TEST)]
        _write_texts(folder / source.file, splits, len(source.classes), rng)
    (folder / COMPLETE).write_text("Random numbers, not data.\n", encoding="utf-8")


def _archives(rng: np.random.Generator) -> dict[str, Mapping[str, Array]]:
    archives: dict[str, Mapping[str, Array]] = {
        "mnist.npz": _split(rng, GREY, len(DIGITS)),
        "emnist_letters_af.npz": {
            **_split(rng, GREY, len(LETTERS)),
            "classes": np.array(LETTERS),
        },
        "cifar10.npz": {**_split(rng, COLOUR, 10), "classes": np.array(DIGITS)},
        "cifar100_subset.npz": _cifar100(rng),
        "svhn_test10k.npz": {
            key: array for key, array in _split(rng, COLOUR, 10).items() if "test" in key
        },
        "chars74k_hnd.npz": {
            **_whole(rng, GREY, len(LETTERS)),
            "writer": rng.integers(10, size=NUM_TRAIN),
            "classes": np.array(LETTERS),
        },
        "pneumoniamnist.npz": _pneumonia(rng),
    }
    archives |= {name: _chest(rng, number) for name, number in FINDINGS.items()}
    for source in LIBSVM_FILES.values():
        binary = source.num_features > len(DIGITS)
        x = rng.normal(size=(NUM_TRAIN + NUM_TEST, source.num_features)).astype(np.float32)
        y = rng.integers(2, size=len(x))
        archives[source.file] = {"x_train": (x > 1) + 0.0 if binary else x, "y_train": y}
    return archives


def _images(rng: np.random.Generator, number: int, shape: tuple[int, ...]) -> Array:
    return rng.integers(256, size=(number, *shape), dtype=np.uint8)


def _labels(number: int, num_classes: int) -> Array:
    """Return labels of which every class has as many, or one more."""
    return np.arange(number) % num_classes


def _split(
    rng: np.random.Generator, shape: tuple[int, ...], num_classes: int
) -> dict[str, Array]:
    return {
        "x_train": _images(rng, NUM_TRAIN, shape),
        "y_train": _labels(NUM_TRAIN, num_classes),
        "x_test": _images(rng, NUM_TEST, shape),
        "y_test": _labels(NUM_TEST, num_classes),
    }


def _whole(
    rng: np.random.Generator, shape: tuple[int, ...], num_classes: int
) -> dict[str, Array]:
    return {"x": _images(rng, NUM_TRAIN, shape), "y": _labels(NUM_TRAIN, num_classes)}


def _cifar100(rng: np.random.Generator) -> dict[str, Array]:
    """Return images of the classes that FedMD calls private, each a superclass of its own."""
    split = _split(rng, COLOUR, len(FEDMD_CLASSES))
    coarse = {f"y_{part}_coarse": split[f"y_{part}"] for part in ("train", "test")}
    fine = {
        f"y_{part}": np.array(FEDMD_CLASSES)[split[f"y_{part}"]] for part in ("train", "test")
    }
    return {
        **split,
        **fine,
        **coarse,
        "fine_names": np.array([f"fine {number}" for number in range(NUM_FINE)]),
        "coarse_names": np.array([f"coarse {number}" for number in range(NUM_COARSE)]),
    }


def _pneumonia(rng: np.random.Generator) -> dict[str, Array]:
    split = _split(rng, GREY, 2)
    held = {"x_val": split["x_test"], "y_val": split["y_test"]}
    return {**split, **held, "classes": np.array(["normal", "pneumonia"])}


def _chest(rng: np.random.Generator, num_findings: int) -> dict[str, Array]:
    return {
        "x": _images(rng, NUM_TRAIN, CHEST),
        "y": rng.integers(2, size=(NUM_TRAIN, num_findings)),
        "patient_id": _labels(NUM_TRAIN, NUM_PATIENTS),
        "classes": np.array([f"finding {number}" for number in range(num_findings)]),
    }


def _write_texts(
    path: Path, splits: list[tuple[str, int]], num_classes: int, rng: np.random.Generator
) -> None:
    with lzma.open(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["split", "label", "text"])
        for split, number in splits:
            for row in range(number):
                words = rng.integers(NUM_WORDS, size=8)
                text = " ".join(f"word{word}" for word in words)
                table.writerow([split, row % num_classes, text])
