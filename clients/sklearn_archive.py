"""Scikit-learn models and scalers whose prediction is plain numpy, as skops archives.

A received archive is opened only after it was found to be small, flat and of the expected
type.
"""

import copy
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from clients.sklearn_arrays import OWNER, Shape, as_classifier
from clients.tabular import require_names
from fl_strategies.exceptions import KnowledgeMismatch, MissingExtra, require_known
from fl_strategies.protocols import Array

try:
    import skops.io
    from sklearn import clone, naive_bayes, preprocessing
    from sklearn.decomposition import PCA
    from sklearn.neural_network import MLPClassifier
except ImportError as error:
    raise MissingExtra(OWNER, str(error.name), "sklearn") from error

MAX_ARCHIVE_MEMBERS: Final = 256
# Text takes many times its size once it is parsed; that of a real model is a few kilobytes.
MAX_SCHEMA_BYTES: Final = 2**20
# Models and scalers that travel as archives, each with all that its prediction reads.
# Counts of training rows and the history of training stay where they are.
ARCHIVED_MODELS: Final[dict[type, tuple[str, ...]]] = {
    naive_bayes.GaussianNB: ("theta_", "var_", "class_prior_"),
    naive_bayes.BernoulliNB: ("feature_log_prob_", "class_log_prior_"),
    naive_bayes.MultinomialNB: ("feature_log_prob_", "class_log_prior_"),
    naive_bayes.ComplementNB: ("feature_log_prob_", "class_log_prior_"),
    MLPClassifier: ("coefs_", "intercepts_", "n_layers_", "n_outputs_", "out_activation_"),
}
ARCHIVED_SCALERS: Final[dict[type, tuple[str, ...]]] = {
    preprocessing.StandardScaler: ("mean_", "scale_"),
    preprocessing.MinMaxScaler: ("min_", "scale_"),
    preprocessing.MaxAbsScaler: ("scale_",),
    preprocessing.RobustScaler: ("center_", "scale_"),
    preprocessing.Normalizer: (),
    PCA: ("components_", "mean_", "explained_variance_", "n_components_"),
}
_LEARNED: Final = {**ARCHIVED_MODELS, **ARCHIVED_SCALERS}
# Settings of the machine rather than of the model: sender and receiver may differ.
_LOCAL_PARAMETERS: Final = {"random_state", "n_jobs", "verbose", "copy"}
_PLAIN_NODES: Final = {
    ("builtins.dict", "DictNode"),
    ("builtins.list", "ListNode"),
    ("builtins.tuple", "TupleNode"),
    ("builtins.str", "JsonNode"),
    ("builtins.str", "TypeNode"),
    *((f"numpy.{name}", "NdArrayNode") for name in ("ndarray", "float32", "float64", "int64")),
}


def archive(model: Any) -> Array:
    """Return settings and learned attributes of `model` as a skops archive in uint8."""
    thin = copy.copy(model)
    settings = model.get_params(deep=False).keys() - _LOCAL_PARAMETERS
    kept = settings.union(_LEARNED[type(model)])
    thin.__dict__ = {name: value for name, value in vars(model).items() if name in kept}
    return np.frombuffer(skops.io.dumps(thin, compression=ZIP_DEFLATED), dtype=np.uint8)


def _is_plain(value: object) -> bool:
    """Tell whether a value is finite numbers, text, or a short nest of such."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" and bool(np.isfinite(value).all())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, np.number))


def unarchive(template: Any, array: object, shape: Shape) -> Any:
    """Return a twin of `template` with what the archive says it learned.

    The archive is read only after its members, their sizes and the types it names were
    checked; skops then applies its own list of trusted types, which is not extended.
    """
    is_bytes = isinstance(array, np.ndarray) and array.dtype == np.uint8
    require_known(is_bytes, OWNER, "archive", "an array of uint8", type(array).__name__)
    data = np.asarray(array).tobytes()
    try:
        _check_archive(data, type(template), shape.max_bytes)
        loaded = skops.io.loads(data)
        return _adopt(clone(template), loaded, shape)
    except KnowledgeMismatch:
        raise
    except Exception as error:
        raise KnowledgeMismatch(
            f"{OWNER}: archive must be readable by skops, got {type(error).__name__}."
        ) from error


def _adopt(model: Any, loaded: Any, shape: Shape) -> Any:
    """Give `model` what `loaded` learned; both must be of one type and one setting."""
    name = type(loaded).__name__
    require_known(type(loaded) is type(model), OWNER, "archive", f"a {model!r}", name)
    received = vars(loaded)
    for name, setting in model.get_params(deep=False).items():
        agrees = name in _LOCAL_PARAMETERS or repr(received.get(name)) == repr(setting)
        require_known(agrees, OWNER, name, f"{setting!r} as here", "another setting")
    for name in _LEARNED[type(model)]:
        plain = name in received and _is_plain(received[name])
        require_known(plain, OWNER, name, "finite numbers or text", "something else")
        setattr(model, name, received[name])
    return as_classifier(model, shape)


def _check_archive(data: bytes, expected: type, max_bytes: int) -> None:
    """Raise unless the archive is small, flat and names no type but the expected one."""
    with ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        rule = f"at most {MAX_ARCHIVE_MEMBERS} members"
        require_known(len(members) <= MAX_ARCHIVE_MEMBERS, OWNER, "archive", rule, len(members))
        size = sum(member.file_size for member in members)
        rule = f"at most {max_bytes} bytes unpacked"
        require_known(size <= max_bytes, OWNER, "archive", rule, size)
        for member in members:
            _check_member(archive, member)
        schema = json.loads(archive.read("schema.json"))
    allowed = _PLAIN_NODES | {(f"{expected.__module__}.{expected.__name__}", "ObjectNode")}
    for node in _typed_nodes(schema):
        known = (f"{node.get('__module__')}.{node.get('__class__')}", node.get("__loader__"))
        require_known(known in allowed, OWNER, "archive", "of expected types", known)


def _check_member(archive: ZipFile, member: ZipInfo) -> None:
    """Raise unless a member is the schema or one array of exactly its declared size."""
    packing = member.compress_type in (ZIP_STORED, ZIP_DEFLATED)
    require_known(packing, OWNER, "archive", "stored or deflated", member.compress_type)
    if member.filename == "schema.json":
        small = member.file_size <= MAX_SCHEMA_BYTES
        rule = f"with a schema of at most {MAX_SCHEMA_BYTES} bytes"
        require_known(small, OWNER, "archive", rule, member.file_size)
        return
    named = re.fullmatch(r"\d+\.npy", member.filename) is not None
    require_known(named, OWNER, "archive", "a schema and arrays", repr(member.filename))
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        require_known(version == (1, 0), OWNER, "archive", "of array version 1", version)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
    require_known(dtype.kind in "fiu", OWNER, "archive", "of numbers", dtype)
    require_known(member.file_size == expected, OWNER, "archive", "whole arrays", expected)


def _typed_nodes(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every part of a schema that names a type or a loader."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.keys() & {"__class__", "__module__", "__loader__"}:
                yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def archive_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` from the archive named "skops"."""
    require_names(OWNER, arrays, {"skops"})
    model = unarchive(template, arrays["skops"], shape)
    scores = probe(model.predict_proba, shape.width)
    fits = scores.shape == (1, shape.num_classes)
    require_known(fits, OWNER, "skops", f"a model of {shape.num_classes} classes", scores.shape)
    return model


def probe(function: Callable[[Array], Any], width: int) -> Array:
    """Return what a received model makes of one row; refuse it if it cannot."""
    try:
        with np.errstate(all="ignore"):
            return np.asarray(function(np.zeros((1, width))))
    except Exception as error:
        raise KnowledgeMismatch(
            f"{OWNER}: a received model must score a row of {width}, got {error!r}."
        ) from error
