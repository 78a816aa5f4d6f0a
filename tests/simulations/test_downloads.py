"""Image sets from a server that offers small archives in the owners' own formats."""

import functools
import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.encoders.named import import_torchvision
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData
from simulations.data import images as downloads
from simulations.data.sets import Request, load_dataset
from simulations.data.splits import Dataset

pytestmark = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")
RNG = np.random.default_rng(0)
FEW = {"train": 40, "test": 20}


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a line on the screen for each."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a server on this machine, and the folder that it offers."""
    folder = tmp_path_factory.mktemp("origin")
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", folder
        server.shutdown()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FL_STRATEGIES_DATA", raising=False)


def offer(origin: tuple[str, Path], file: str, content: bytes) -> str:
    """Put a file on the server; return its checksum."""
    (origin[1] / file).write_bytes(content)
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def pixels(*shape: int) -> Array:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def idx(array: Array) -> bytes:
    """Return an array in the format of MNIST's files."""
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def load(name: str) -> Dataset:
    return load_dataset(name, Request(rng=np.random.RandomState(0)))


def bytes_of(rows: Array, data: Dataset) -> Array:
    """Return normalised images as the bytes that they were, (n, height, width, channels)."""
    mean, deviation = (np.array(part) for part in downloads.IMAGE_SETS[data.name].scale)
    images: Array = np.rint(255 * (rows.transpose(0, 2, 3, 1) * deviation + mean))
    return images.astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "kind"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_digits_and_clothes_come_from_torchvision(
    name: str, kind: str, origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and labels are those of the four files."""
    class_ = getattr(import_torchvision(name).datasets, kind)
    arrays, resources = {}, []
    for part, size in FEW.items():
        arrays[part] = pixels(size, 28, 28)
        pairs = (("images-idx3", arrays[part]), ("labels-idx1", np.arange(size) % 10))
        for key, array in pairs:
            file = f"{'train' if part == 'train' else 't10k'}-{key}-ubyte.gz"
            resources.append((file, offer(origin, file, gzip.compress(idx(array)))))
    monkeypatch.setattr(class_, "mirrors", [origin[0]])
    monkeypatch.setattr(class_, "resources", resources)
    data = load(name)
    assert np.array_equal(bytes_of(data.x_train, data)[..., 0], arrays["train"])
    assert data.y_train.tolist() == [label % 10 for label in range(40)]
    assert (len(data.x_public), len(data.x_test), len(data.classes)) == (10, 10, 10)


def test_letters_are_upright_and_the_first_six(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMNIST's images lie on their side and its labels begin with 1."""
    emnist = import_torchvision("emnist-letters").datasets.EMNIST
    upright = {part: pixels(52, 28, 28) for part in FEW}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for part, images in upright.items():
            pairs = (("images-idx3", images.transpose(0, 2, 1)), ("labels-idx1", LETTER_LABELS))
            for key, array in pairs:
                name = f"gzip/emnist-letters-{part}-{key}-ubyte.gz"
                archive.writestr(name, gzip.compress(idx(array)))
    checksum = offer(origin, "gzip.zip", content.getvalue())
    monkeypatch.setattr(emnist, "url", f"{origin[0]}gzip.zip")
    monkeypatch.setattr(emnist, "md5", checksum)
    data = load("emnist-letters")
    kept = np.flatnonzero(LETTER_LABELS <= 6)
    assert data.y_train.tolist() == (LETTER_LABELS[kept] - 1).tolist()
    assert np.array_equal(bytes_of(data.x_train, data)[..., 0], upright["train"][kept])


LETTER_LABELS = np.arange(52) % 26 + 1


def test_house_numbers_come_whole(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SVHN has training images of its own, and its label 10 is the digit 0."""
    savemat = pytest.importorskip("scipy.io").savemat
    svhn = import_torchvision("svhn").datasets.SVHN
    images, listed = {}, {}
    for part, size in FEW.items():
        images[part], content = pixels(size, 32, 32, 3), io.BytesIO()
        labels = (np.arange(size, dtype=np.uint8) % 10 + 1).reshape(-1, 1)
        savemat(content, {"X": images[part].transpose(1, 2, 3, 0), "y": labels})
        file = f"{part}_32x32.mat"
        checksum = offer(origin, file, content.getvalue())
        listed[part] = [f"{origin[0]}{file}", file, checksum]
    monkeypatch.setattr(svhn, "split_list", listed)
    data = load("svhn")
    assert np.array_equal(bytes_of(data.x_train, data), images["train"])
    assert data.y_train.tolist() == [(row % 10 + 1) % 10 for row in range(40)]
    assert (len(data.x_public), len(data.x_test)) == (10, 10)


def cifar_rows(labels: Array, images: Array) -> bytes:
    flat = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.hstack([labels, flat]).astype(np.uint8).tobytes()


def offer_cifar(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, file: str, content: bytes
) -> None:
    monkeypatch.setattr(downloads, "CIFAR", origin[0])
    monkeypatch.setitem(downloads.MD5, file, offer(origin, file, content))


def test_cifar10_needs_no_pickle(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five batches follow each other, and colours are the last axis."""
    images = pixels(70, 32, 32, 3)
    labels = (np.arange(70) % 10).reshape(-1, 1)
    folder = "cifar-10-batches-bin"
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    cuts = [(10 * place, 10 * place + 10) for place in range(5)] + [(50, 70)]
    files = {
        f"{folder}/{name}.bin": cifar_rows(labels[first:last], images[first:last])
        for name, (first, last) in zip(names, cuts, strict=True)
    }
    files[f"{folder}/batches.meta.txt"] = "\n".join("abcdefghij").encode() + b"\n\n"
    offer_cifar(origin, monkeypatch, "cifar-10-binary.tar.gz", tar(files))
    data = load("cifar10")
    assert data.classes == tuple("abcdefghij")
    assert np.array_equal(bytes_of(data.x_train, data), images[:50])
    assert data.y_train.tolist() == labels[:50, 0].tolist()


def test_cifar100_has_both_kinds_of_label(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first byte of a row is the superclass, the second the class."""
    images = pixels(100, 32, 32, 3)
    fine = np.arange(100)
    rows = cifar_rows(np.stack([fine // 5, fine], axis=1), images)
    names = {"fine": 100, "coarse": 20}
    files = {f"cifar-100-binary/{part}.bin": rows for part in FEW} | {
        f"cifar-100-binary/{kind}_label_names.txt": "\n".join(
            f"{kind}{number}" for number in range(size)
        ).encode()
        for kind, size in names.items()
    }
    offer_cifar(origin, monkeypatch, "cifar-100-binary.tar.gz", tar(files))
    assert len(load("cifar100").classes) == 100
    data = load("cifar100-superclasses")
    assert data.classes == tuple(f"coarse{number}" for number in range(6))
    assert data.y_train.tolist() == [row // 5 for row in range(30)]


def test_pneumonia_comes_from_medmnist(
    origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation images are the public ones."""
    sizes = {"train": 30, "val": 10, "test": 20}
    arrays: dict[str, Any] = {}
    for part, size in sizes.items():
        arrays[f"{part}_images"] = pixels(size, 28, 28)
        arrays[f"{part}_labels"] = np.arange(size).reshape(-1, 1) % 2
    content = io.BytesIO()
    np.savez(content, **arrays)
    file = "pneumoniamnist.npz"
    monkeypatch.setattr(downloads, "MEDMNIST", origin[0])
    monkeypatch.setitem(downloads.MD5, file, offer(origin, file, content.getvalue()))
    data = load("pneumonia")
    assert (len(data.x_train), len(data.x_public), len(data.x_test)) == (30, 10, 20)
    assert np.array_equal(bytes_of(data.x_train, data)[..., 0], arrays["train_images"])


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_another_file_than_announced_is_refused(
    content: bytes, origin: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not the published checksum is not even opened."""
    monkeypatch.setattr(downloads, "CIFAR", origin[0])
    offer(origin, "cifar-10-binary.tar.gz", content)
    with pytest.raises(InvalidData, match="cifar10 must be in a local folder or downloadable"):
        load("cifar10")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "pneumonia"])
def test_without_network_the_error_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the file, its arrays, the setting and the source."""
    nowhere = "http://127.0.0.1:9/"
    monkeypatch.setattr(downloads, "CIFAR", nowhere)
    monkeypatch.setattr(downloads, "MEDMNIST", nowhere)
    monkeypatch.setattr(import_torchvision("mnist").datasets.MNIST, "mirrors", [nowhere])
    words = r"data-dir or FL_STRATEGIES_DATA .* \w+.npz with x_train, .* come from https://"
    with pytest.raises(InvalidData, match=words):
        load(name)
