import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.strategies.fedmd import FedMD
from fl_strategies.strategies.fedmd.student import ContinuingLearner
from simulations.config import Settings
from simulations.data.images import IMAGE_SETS, fit_images, normalise
from simulations.data.sets import DATA_VARIABLE, Dataset, Request, load_dataset
from simulations.federation import load_federation
from simulations.runtime.client_app import app
from simulations.runtime.local import run_local

REAL_DATA = os.environ.get(DATA_VARIABLE, "")

FINE_NAMES = np.array([f"fine{number}" for number in range(100)])
COARSE_NAMES = np.array([f"coarse{number}" for number in range(20)])


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide data folders and caches of the machine."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def labels(size: int, num_classes: int) -> Any:
    return (np.arange(size) % num_classes).astype(np.uint8)


def split_arrays(shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
    return {
        "x_train": pixels(60, *shape),
        "y_train": labels(60, num_classes),
        "x_test": pixels(20, *shape, seed=1),
        "y_test": labels(20, num_classes),
    }


def cifar100_arrays() -> dict[str, Any]:
    """Return four training and two test images of each of 15 fine classes."""
    fine = np.repeat([0, 2, 20, 63, 71, 82, *range(30, 39)], 4).astype(np.uint8)
    coarse = np.repeat([0, 1, 7, 8, 9, 2, 0, 0, 1, 1, 2, 3, 4, 5, 5], 4).astype(np.uint8)
    return {
        "x_train": pixels(60, 32, 32, 3),
        "y_train": fine,
        "y_train_coarse": coarse,
        "x_test": pixels(30, 32, 32, 3, seed=1),
        "y_test": fine[::2],
        "y_test_coarse": coarse[::2],
        "fine_names": FINE_NAMES,
        "coarse_names": COARSE_NAMES,
    }


def patient_arrays(size: int, num_labels: int, patients: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": pixels(size, 32, 32),
        "y": rng.integers(2, size=(size, num_labels), dtype=np.uint8),
        "patient_id": patients,
        "classes": np.array([f"finding{number}" for number in range(num_labels)]),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small file of every image set."""
    digits, colours = split_arrays((28, 28), 10), split_arrays((32, 32, 3), 10)
    validation = {"x_val": pixels(9, 28, 28, seed=2), "y_val": labels(9, 2)}
    characters = {"x": pixels(50, 28, 28), "y": labels(50, 5)}
    writers = np.repeat(np.arange(5, dtype=np.uint8), 10)
    clothes = np.array([f"cloth{number}" for number in range(10)])
    patients = np.repeat(np.arange(100, 120, dtype=np.int32), 5)
    names = np.repeat([f"p{number}" for number in range(10)], 3)
    files: dict[str, dict[str, Any]] = {
        "mnist": digits,
        "fashion_mnist": {**digits, "classes": clothes},
        "emnist_letters_af": {**split_arrays((28, 28), 6), "classes": [*"abcdef"]},
        "cifar10": {**colours, "classes": [*"0123456789"]},
        "cifar100_subset": cifar100_arrays(),
        "svhn_test10k": {"x_test": pixels(50, 32, 32, 3), "y_test": labels(50, 10)},
        "chars74k_hnd": {**characters, "writer": writers, "classes": [*"01aBc"]},
        "pneumoniamnist": {
            **split_arrays((28, 28), 2),
            **validation,
            "classes": ["normal", "pneumonia"],
        },
        "nih_cxr14_5k": patient_arrays(100, 14, patients),
        "covid_cxr": patient_arrays(30, 7, names),
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return tmp_path


def load(folder: Path, name: str, seed: int = 0, **options: Any) -> Dataset:
    rng = np.random.RandomState(seed)
    return load_dataset(name, Request(rng=rng, data_dir=str(folder), **options))


def sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.x_train), len(data.x_public), len(data.x_test)


def rows_of(x: Any) -> set[bytes]:
    return {row.tobytes() for row in x}


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_set_has_normalised_channels_of_pixels(folder: Path, name: str) -> None:
    """Rows are float32 (channels, height, width) in the published scale, with labels."""
    data = load(folder, name)
    small = ("mnist", "fashion-mnist", "emnist-letters", "chars74k", "pneumonia")
    side = 28 if name in small else 32
    channels = 3 if name.startswith(("cifar", "svhn")) else 1
    mean, deviation = (np.array(each)[:, None, None] for each in IMAGE_SETS[name].scale)
    for x in (data.x_train, data.x_public, data.x_test):
        assert x.dtype == np.float32
        assert x.shape[1:] == (channels, side, side)
        levels = (x * deviation + mean) * 255
        assert np.allclose(levels, np.rint(levels), atol=1e-3)
        assert levels.min() >= -1e-3
        assert levels.max() <= 255.001
    shape = (data.num_classes,) if data.task == "multi-label" else ()
    assert data.y_train.dtype == np.int64
    assert data.y_train.shape == (len(data.x_train), *shape)
    assert data.y_public is not None
    assert data.y_public.shape == (len(data.x_public), *shape)


SIZES = {
    **dict.fromkeys(("mnist", "fashion-mnist", "emnist-letters", "cifar10"), (60, 10, 10)),
    "cifar100": (60, 15, 15),
    "cifar100-fedmd": (24, 6, 6),
    "cifar100-superclasses": (48, 12, 12),
    **dict.fromkeys(("svhn", "chars74k"), (30, 10, 10)),
    "pneumonia": (60, 9, 20),
    "nih-cxr": (60, 20, 20),
    "covid-cxr": (18, 6, 6),
}
"""Half of a test part, a validation part, or a fifth of one lot is public."""


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_no_image_is_in_two_parts_and_none_is_lost(folder: Path, name: str) -> None:
    """Train, public and test are disjoint, and source and seed decide them."""
    data, again, other = load(folder, name), load(folder, name), load(folder, name, seed=1)
    assert sizes(data) == SIZES[name]
    train, public, test = map(rows_of, (data.x_train, data.x_public, data.x_test))
    assert len(train | public | test) == sum(sizes(data))
    assert np.array_equal(data.x_test, again.x_test)
    assert name == "pneumonia" or not np.array_equal(data.x_test, other.x_test)


def test_mnist_keeps_all_training_images_and_halves_the_test_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and split are those of the first release, also from the environment's folder.

    A folder that is asked for wins over it.
    """
    monkeypatch.setenv(DATA_VARIABLE, str(folder / "elsewhere"))
    assert sizes(load(folder, "mnist")) == (60, 10, 10)
    monkeypatch.setenv(DATA_VARIABLE, str(folder))
    data = load_dataset("mnist", Request(rng=np.random.RandomState(4)))
    arrays = split_arrays((28, 28), 10)
    expected = (arrays["x_train"] / 255 - 0.1307) / 0.3081
    assert np.allclose(data.x_train[:, 0], expected, atol=1e-5)
    assert data.y_train.tolist() == arrays["y_train"].tolist()
    order = np.random.RandomState(4).permutation(20)
    held_out = (arrays["x_test"][order] / 255 - 0.1307) / 0.3081
    assert np.allclose(data.x_public[:, 0], held_out[:10], atol=1e-5)
    assert np.allclose(data.x_test[:, 0], held_out[10:], atol=1e-5)
    assert data.y_test.tolist() == arrays["y_test"][order[10:]].tolist()
    assert data.y_public is not None
    assert data.y_public.tolist() == arrays["y_test"][order[:10]].tolist()


def test_colours_keep_their_channel(folder: Path) -> None:
    """The last axis of the file becomes the first of a row, channel by channel."""
    data = load(folder, "cifar10")
    red, green, blue = split_arrays((32, 32, 3), 10)["x_train"].transpose(3, 0, 1, 2) / 255
    assert np.allclose(data.x_train[:, 0], (red - 0.4914) / 0.2470, atol=1e-5)
    assert np.allclose(data.x_train[:, 1], (green - 0.4822) / 0.2435, atol=1e-5)
    assert np.allclose(data.x_train[:, 2], (blue - 0.4465) / 0.2616, atol=1e-5)


# CIFAR-100


def test_cifar100_has_the_fine_classes_that_occur(folder: Path) -> None:
    """Classes are renumbered without gaps and keep their names."""
    data = load(folder, "cifar100")
    assert data.num_classes == 15
    assert data.classes[2] == "fine20"
    assert np.bincount(data.y_train).tolist() == [4] * 15


def test_fedmd_takes_six_classes_of_cifar100(folder: Path) -> None:
    """Only the private classes of FedMD are left, in its order, with their images."""
    data = load(folder, "cifar100-fedmd")
    assert data.classes == ("fine0", "fine2", "fine20", "fine63", "fine71", "fine82")
    assert sizes(data) == (24, 6, 6)
    assert data.y_train.tolist() == np.repeat(np.arange(6), 4).tolist()
    mean, deviation = IMAGE_SETS["cifar100"].scale
    expected = normalise(cifar100_arrays()["x_train"][:24], mean, deviation)
    assert np.array_equal(data.x_train, expected)


def test_superclasses_are_grouped_by_their_fine_classes(folder: Path) -> None:
    """A party that holds group g holds the g-th fine class of every superclass."""
    data = load(folder, "cifar100-superclasses")
    assert data.classes == tuple(f"coarse{number}" for number in range(6))
    assert data.groups is not None
    pairs = sorted({*zip(data.y_train.tolist(), data.groups.tolist(), strict=True)})
    held = {0: 3, 1: 3, 2: 2, 3: 1, 4: 1, 5: 2}
    assert pairs == [(label, group) for label, size in held.items() for group in range(size)]


# Writers and patients


def test_characters_name_their_writers(folder: Path) -> None:
    """Every private row keeps the writer that the file gives it."""
    data = load(folder, "chars74k")
    stored = pixels(50, 28, 28)
    mean, deviation = IMAGE_SETS["chars74k"].scale
    writers = {
        row.tobytes(): writer // 10
        for writer, row in enumerate(normalise(stored[..., None], mean, deviation))
    }
    assert data.groups is not None
    assert [writers[row.tobytes()] for row in data.x_train] == data.groups.tolist()


@pytest.mark.parametrize(("name", "num_images"), [("nih-cxr", 100), ("covid-cxr", 30)])
@pytest.mark.parametrize("seed", range(3))
def test_no_patient_is_in_two_parts(
    folder: Path, name: str, num_images: int, seed: int
) -> None:
    """All images of a person are private, public or for testing, also with names as text."""
    data = load(folder, name, seed=seed)
    images_a_patient = 5 if name == "nih-cxr" else 3
    mean, deviation = IMAGE_SETS[name].scale
    stored = normalise(pixels(num_images, 32, 32)[..., None], mean, deviation)
    patient = {row.tobytes(): n // images_a_patient for n, row in enumerate(stored)}
    parts = [
        {patient[row.tobytes()] for row in x}
        for x in (data.x_train, data.x_public, data.x_test)
    ]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert data.task == "multi-label"
    assert set(np.unique(data.y_train)) == {0, 1}


# Public images of another domain


@pytest.mark.parametrize(
    ("name", "public", "expected"),
    [
        ("cifar10", "cifar100", (60, 60, 20)),
        ("cifar100-fedmd", "cifar10", (24, 60, 12)),
        ("mnist", "emnist-letters", (60, 60, 20)),
        ("emnist-letters", "mnist", (60, 60, 20)),
        ("nih-cxr", "covid-cxr", (60, 30, 40)),
        ("nih-cxr", "pneumonia", (60, 60, 40)),
        ("pneumonia", "nih-cxr", (60, 100, 20)),
        ("svhn", "mnist", (30, 60, 20)),
        ("mnist", "svhn", (60, 50, 20)),
    ],
)
def test_another_set_gives_the_public_images(
    folder: Path, name: str, public: str, expected: tuple[int, int, int]
) -> None:
    """Its training images, in the shape of the private ones, without labels."""
    data = load(folder, name, public=public)
    assert sizes(data) == expected
    assert data.x_public.shape[1:] == data.row_shape
    assert data.y_public is None


def test_private_images_do_not_depend_on_the_public_ones(folder: Path) -> None:
    """The same seed trains on the same rows, so that public sets can be compared."""
    own, covid, pneumonia = (
        load(folder, "nih-cxr", public=public) for public in ("", "covid-cxr", "pneumonia")
    )
    assert np.array_equal(own.x_train, covid.x_train)
    assert np.array_equal(covid.x_test, pneumonia.x_test)
    assert rows_of(own.x_test) < rows_of(covid.x_test)


def test_public_images_have_the_scale_of_the_private_set(folder: Path) -> None:
    """A model sees a white pixel as the same number in both domains."""
    data = load(folder, "mnist", public="emnist-letters")
    letters = split_arrays((28, 28), 6)["x_train"]
    assert np.allclose(data.x_public[:, 0], (letters / 255 - 0.1307) / 0.3081, atol=1e-5)


def test_joint_classes_keep_the_labels_of_public_images(folder: Path) -> None:
    """Letters keep their numbers, digits come after them, and no row changes."""
    apart = load(folder, "emnist-letters", public="mnist", num_public=13)
    joint = load(folder, "emnist-letters", public="mnist", num_public=13, joint_classes=True)

    assert joint.classes == (*"abcdef", *"0123456789")
    assert (joint.num_private_classes, joint.num_classes) == (6, 16)
    assert np.array_equal(joint.x_public, apart.x_public)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(joint, name), getattr(apart, name))
    digits = split_arrays((28, 28), 10)
    images = normalise(digits["x_train"][..., None], *IMAGE_SETS["emnist-letters"].scale)
    pairs = zip(images, digits["y_train"], strict=True)
    digit_of = {image.tobytes(): str(label) for image, label in pairs}
    assert joint.y_public is not None
    assert [joint.classes[label] for label in joint.y_public] == [
        digit_of[image.tobytes()] for image in joint.x_public
    ]


def test_a_class_of_the_same_name_is_the_same_class(folder: Path) -> None:
    """Digits of two sets share their ten classes; none is public only."""
    data = load(folder, "svhn", public="mnist", joint_classes=True)

    assert (data.num_private_classes, data.num_classes) == (10, 10)
    assert data.y_public is not None
    assert np.array_equal(data.y_public, split_arrays((28, 28), 10)["y_train"])


@pytest.mark.parametrize(
    ("name", "public"), [("nih-cxr", "pneumonia"), ("pneumonia", "nih-cxr")]
)
def test_joint_classes_need_one_label_an_image(folder: Path, name: str, public: str) -> None:
    """Findings, of which an image has several, are no classes."""
    with pytest.raises(InvalidParameter, match="joint-classes must be false unless each image"):
        load(folder, name, public=public, joint_classes=True)


def joint_letters(folder: Path, **more: Any) -> Settings:
    return Settings.of(
        data="emnist-letters",
        data_dir=str(folder),
        public="mnist",
        joint_classes=True,
        num_parties=2,
        min_records=1,
        learner="mlp",
        final_learner="mlp",
        **more,
    )


def test_private_rows_are_dealt_by_their_own_classes(folder: Path) -> None:
    """Half of the letters each, whatever classes the public rows have."""
    federation = load_federation(joint_letters(folder, partition="pooled-halves"))

    held = [{*federation.party(number).y.tolist()} for number in (0, 1)]

    assert held == [{0, 1, 2}, {3, 4, 5}]


@pytest.mark.parametrize("once", [False, True])
def test_parties_of_fedmd_learn_the_public_classes_first(folder: Path, once: bool) -> None:
    """After pre-training they know digits, which no private row shows; alone they do too."""
    answers, alone = {}, {}
    for epochs in (0, 60):
        settings = joint_letters(
            folder,
            partition="iid",
            strategy="fedmd",
            pretrain_epochs=epochs,
            pretrain_once=once and epochs > 0,
            epochs_initial=1,
            epochs=1,
            learning_rate=0.003,
        )
        federation = load_federation(settings)
        strategy = federation.strategy()
        run_local(strategy, app, 2, run_config=settings.to_run_config())
        assert isinstance(strategy, FedMD)
        assert strategy.consensus_ is not None
        assert strategy.indices_ is not None
        digits = federation.dataset.y_public
        assert digits is not None
        answers[epochs] = np.mean(strategy.consensus_ == digits[strategy.indices_])
        alone[epochs] = federation.evaluate_party(0).metrics[federation.metric]

    assert answers[60] > 0.5 > answers[0]
    assert alone[60] != alone[0]


def test_one_model_to_start_from_knows_the_public_rows(folder: Path) -> None:
    """It is trained on them alone, so the private rows cannot change it."""
    settings = joint_letters(
        folder, strategy="fedmd", pretrain_epochs=60, pretrain_once=True, learning_rate=0.003
    )
    federation = load_federation(settings)
    others = load_federation(settings.but(train_rows=20, partition="iid"))

    model = federation.factory("mlp")()
    assert isinstance(model, ContinuingLearner)
    model = model.from_arrays(federation.shared_start)

    data = federation.dataset
    assert np.mean(model.predict(data.x_public) == data.y_public) > 0.9
    for name, array in federation.shared_start.items():
        assert np.array_equal(array, others.shared_start[name])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pretrain_epochs": 0}, "pretrain-epochs must be at least 1 with pretrain-once"),
        ({"learner": "mlp,mnist-net"}, "learner must be the final-learner with pretrain-once"),
        ({"joint_classes": False}, "joint-classes must be true for public rows of another set"),
        (
            {"learner": "random-forest", "final_learner": "random-forest"},
            "learner must be a network, which continues learning, .* got 'random-forest'",
        ),
    ],
)
def test_one_model_to_start_from_needs_labels_and_networks(
    folder: Path, wrong: dict[str, Any], message: str
) -> None:
    """Said before anything is trained."""
    right = joint_letters(folder, strategy="fedmd", pretrain_epochs=1, pretrain_once=True)

    with pytest.raises(InvalidParameter, match=message):
        load_federation(right.but(**wrong)).strategy()


def test_limits_apply_to_public_images_and_to_groups(folder: Path) -> None:
    """Any number of rows of each kind can be asked for; labels and groups follow."""
    data = load(folder, "cifar10", public="cifar100", num_train=11, num_public=7, num_test=5)
    assert sizes(data) == (11, 7, 5)
    assert len(data.y_train) == 11
    written = load(folder, "chars74k", num_train=9)
    assert written.groups is not None
    assert written.groups.shape == (9,)


# Fitting images


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 9),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.sampled_from([1, 3]),
    wanted=st.sampled_from([1, 3]),
)
def test_images_of_any_size_and_colour_are_made_to_fit(
    size: int, height: int, width: int, channels: int, wanted: int
) -> None:
    """Bytes stay bytes, and fitting an image that fits changes nothing."""
    x = pixels(2, size, size, channels)
    fitted = fit_images(x, (height, width, wanted))
    assert fitted.shape == (2, height, width, wanted)
    assert fitted.dtype == np.uint8
    assert np.array_equal(fit_images(fitted, (height, width, wanted)), fitted)


def test_a_smaller_image_gets_a_black_border_and_a_larger_one_loses_it() -> None:
    """From 28 to 32 pixels and back is the same image."""
    x = pixels(3, 28, 28, 1)
    wide = fit_images(x, (32, 32, 1))
    assert np.array_equal(wide[:, 2:30, 2:30], x)
    assert wide.sum() == x.sum()
    assert np.array_equal(fit_images(wide, (28, 28, 1)), x)


def test_grey_is_the_luminance_of_colours() -> None:
    """Pure colours have the brightness of television's rule; grey survives a round trip."""
    colours = (np.eye(3) * 255).astype(np.uint8).reshape(3, 1, 1, 3)
    assert fit_images(colours, (1, 1, 1)).ravel().tolist() == [76, 150, 29]
    grey = pixels(4, 5, 5, 1)
    assert np.array_equal(fit_images(fit_images(grey, (5, 5, 3)), (5, 5, 1)), grey)


# Files that are missing or wrong


@pytest.mark.parametrize("name", ["chars74k", "nih-cxr", "covid-cxr"])
def test_a_missing_file_says_what_is_needed(tmp_path: Path, name: str) -> None:
    """The answer names file, arrays and the source of the images."""
    source = IMAGE_SETS[name]
    message = (
        rf"{name} must be in a local folder, got none\. .* {source.file} with "
        rf"{', '.join(source.keys)}\. The data come from {source.origin}"
    )
    with pytest.raises(InvalidData, match=message):
        load(tmp_path, name)


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mnist.npz", split_arrays((28, 28), 10)),
    "covid-cxr": ("covid_cxr.npz", patient_arrays(30, 7, np.arange(30))),
    "cifar100-fedmd": ("cifar100_subset.npz", cifar100_arrays()),
}
FIVES = {"y_train": np.full(60, 5, np.uint8), "y_test": np.full(30, 5, np.uint8)}
"""Another part of CIFAR-100, which is no substitute."""


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mnist",
            {"x_train": pixels(60, 784)},
            r"x_train must be bytes \(n, height, width\) or",
        ),
        ("mnist", {"x_train": np.zeros((60, 28, 28))}, r"x_train must be bytes .* got float64"),
        (
            "mnist",
            {"x_test": pixels(20, 28, 28, 4)},
            r"x_test must be bytes .*\(20, 28, 28, 4\)",
        ),
        (
            "mnist",
            {"x_test": pixels(20, 27, 28)},
            r"x_test must be images of shape \(28, 28, 1\)",
        ),
        ("mnist", {"x_train": pixels(0, 28, 28)}, r"x_train must be bytes"),
        ("mnist", {"y_train": labels(60, 11)}, r"y_train must be between 0 and 9"),
        ("mnist", {"y_test": labels(19, 10)}, r"y_test must be 20 labels, one per row, got 19"),
        ("covid-cxr", {"y": np.zeros((30, 6), np.uint8)}, r"y must be of shape \(30, 7\)"),
        ("covid-cxr", {"y": np.full((30, 7), 2)}, r"y must be an array of -1, 0 and 1"),
        (
            "covid-cxr",
            {"patient_id": np.arange(29)},
            r"patient_id must be 30 names, got \(29,\)",
        ),
        ("cifar100-fedmd", FIVES, r"the file must be with classes \(0, 2, 20"),
    ],
)
def test_a_wrong_file_is_described(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    """Odd shapes, types, lengths, labels and patients each give one sentence."""
    file, arrays = WHOLE[name]
    np.savez(tmp_path / file, **{**arrays, **change})
    owner = "load_dataset" if change is FIVES else file
    with pytest.raises(InvalidData, match=rf"{owner}: {message}"):
        load(tmp_path, name)


# Real files


@pytest.mark.skipif(not REAL_DATA, reason="needs FL_STRATEGIES_DATA")
@pytest.mark.parametrize("name", [name for name in IMAGE_SETS if name != "fashion-mnist"])
def test_real_images_have_about_mean_0_in_their_scale(name: str) -> None:
    """The constants belong to the images: no channel is far off."""
    data = load_dataset(
        name, Request(rng=np.random.RandomState(0), data_dir=REAL_DATA, num_train=500)
    )
    means = data.x_train.mean(axis=(0, 2, 3))
    assert np.abs(means).max() < 0.35
    assert 0.25 < data.x_train.std() < 1.3
