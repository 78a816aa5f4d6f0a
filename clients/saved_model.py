"""A model as a folder: arrays, and a page of JSON that says what they are.

``model.json`` has the learner's name and settings, the shape of a row, the class list and the
task; ``arrays.npz`` what was learned, as `numpy.load` reads it. Nothing in either is code, and
nothing is unpickled: `load_model` makes the learner anew by its name and gives it the arrays,
which it checks as those of untrusted files. `read_arrays` takes less than numpy does: no
objects, nothing compressed and nothing that claims to be larger than the file is, so that
memory follows the bytes on the disk.
"""

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import numpy as np

from clients.tabular.base import MAX_WIDTH
from fl_strategies import __version__
from fl_strategies._util import SHARED, Array, replace_file
from fl_strategies.aggregation.ensembles import (
    MAX_MEMBERS,
    MeanEnsemble,
    SignedEnsemble,
    StackedEnsemble,
)
from fl_strategies.errors import InvalidData, StrategyError, require_data
from fl_strategies.learners import DenseLearner, Learner, LearnerFactory, Task, require_portable

SUFFIX: Final = ".npy"
NUMBERS: Final = "biuf"
FIRST_FORMAT: Final = (1, 0)
MOST_ARRAYS: Final = 100_000


def write_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Write named arrays; equal arrays give equal bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            plain = np.asarray(array, order="C")
            np.lib.format.write_array(content, plain, allow_pickle=False)
            # A member without a date, which would make every file another one.
            archive.writestr(zipfile.ZipInfo(f"{name}{SUFFIX}"), content.getvalue())
    replace_file(path, file.getvalue(), SHARED)


def read_arrays(owner: str, path: Path) -> dict[str, Array]:
    """Read named arrays of numbers; raise `InvalidData`, with the reason, for anything else."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(owner, members, size)
            return {
                member.filename.removesuffix(SUFFIX): _array(owner, archive.read(member))
                for member in members
            }
    except InvalidData:
        raise
    except Exception as error:  # a hostile archive may fail in any way
        got = type(error).__name__
        raise InvalidData(
            f"{owner}: {path} must be an archive of arrays, got {got}."
        ) from error


def _check_members(owner: str, members: list[zipfile.ZipInfo], size: int) -> None:
    names, what = {member.filename for member in members}, "the archive"
    few, rule = (
        len(names) == len(members) <= MOST_ARRAYS,
        f"at most {MOST_ARRAYS} different arrays",
    )
    require_data(few, owner, what, rule, f"{len(members)} of {len(names)} names")
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    plain = stored and all(name.endswith(SUFFIX) for name in names)
    require_data(plain, owner, what, f"{SUFFIX} files, not compressed", "others")
    claimed = sum(member.file_size for member in members)
    require_data(claimed <= size, owner, what, f"at most {size} bytes", claimed)


def _array(owner: str, content: bytes) -> Array:
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    require_data(version == FIRST_FORMAT, owner, "an array", "of format 1.0", version)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    require_data(dtype.kind in NUMBERS, owner, "an array", "of numbers", dtype)
    claimed, there = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    require_data(claimed == there, owner, "an array", f"of {there} bytes", claimed)
    return np.asarray(np.lib.format.read_array(io.BytesIO(content), allow_pickle=False))


OWNER: Final = "load_model"
FORMAT: Final = 1
FOLDER: Final = "model"
DESCRIPTION: Final = "model.json"
ARRAYS: Final = "arrays.npz"
MEAN: Final = "mean-of-members"
SIGNED: Final = "signed-sum-of-members"
STACKED: Final = "aggregator-of-members"
XGBOOST: Final = "xgboost.json"
TORCH: Final = "state_dict.pt"
SKOPS: Final = "model.skops"
MOST_DESCRIPTION_BYTES: Final = 2**20
MOST_REASON: Final = 600
# Learners by name belong to a package above this one, which may be missing.
CATALOGUE: Final = "simulations.models"
_KEYS: Final = {
    "format": int,
    "learner": str,
    "settings": dict,
    "row-shape": list,
    "classes": list,
    "task": str,
    "version": str,
}


Committee: TypeAlias = MeanEnsemble | SignedEnsemble | StackedEnsemble


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Metadata that is needed to make a model of its arrays.

    Parameters
    ----------
    learner : str
        Name in the catalogue of learners, or any for one's own.
    row_shape : tuple of int
    classes : tuple of str
        Names in the order of the model's scores.
    task : "single-label", "multi-label" or "regression"
    settings : mapping
        Hyper-parameters by kebab-case keys.
    version : str
        Of the package that wrote it.
    """

    learner: str
    row_shape: tuple[int, ...]
    classes: tuple[str, ...]
    task: Task = "single-label"
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``model.json``."""
        return {
            "format": FORMAT,
            "learner": self.learner,
            "settings": dict(self.settings),
            "row-shape": list(self.row_shape),
            "classes": list(self.classes),
            "task": self.task,
            "version": self.version,
        }


def save_model(model: Learner, folder: str | Path, card: ModelCard) -> list[str]:
    """Write a fitted model, and what its own library reads; return the names of the files.

    Raises `UnsupportedLearner` if the model has no array form.
    """
    folder, arrays = Path(folder), require_portable(model).to_arrays()
    _write_card(folder, card)
    write_arrays(arrays, folder / ARRAYS)
    native = _native_files(model, arrays)
    for name, content in native.items():
        replace_file(folder / name, content, SHARED)
    return [DESCRIPTION, ARRAYS, *native]


def save_committee(model: Committee, folder: str | Path, card: ModelCard) -> list[str]:
    """Write how a committee combines its members, which are saved each by itself."""
    signs = {"signs": list(model.signs)} if isinstance(model, SignedEnsemble) else {}
    settings = {"members": len(model.members), **signs}
    names = {MeanEnsemble: MEAN, SignedEnsemble: SIGNED, StackedEnsemble: STACKED}
    _write_card(Path(folder), replace(card, learner=names[type(model)], settings=settings))
    if not isinstance(model, StackedEnsemble):
        return [DESCRIPTION]
    write_arrays(model.weights, Path(folder) / ARRAYS)
    return [DESCRIPTION, ARRAYS]


def member_folder(folder: str | Path, number: int) -> Path:
    """Return where a member of a committee is saved."""
    return Path(folder) / f"member-{number}"


def _write_card(folder: Path, card: ModelCard) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(card.to_json(), indent=2, allow_nan=False)
    replace_file(folder / DESCRIPTION, f"{text}\n".encode(), SHARED)


def load_model(path: str | Path, learner_fn: LearnerFactory | None = None) -> Learner:
    """Return the fitted model that a run left behind.

    The files are untrusted: none of them is executed, and arrays that do not fit raise.

    Parameters
    ----------
    path : str or Path
        Folder of a run, or the folder ``model`` in it.
    learner_fn : factory, optional
        Makes the unfitted learner; needed only for one that has no name in the catalogue,
        such as a network of one's own.

    Raises
    ------
    InvalidData, KnowledgeMismatch
        One sentence on what is wrong with the files.
    """
    folder = Path(path)
    if not (folder / DESCRIPTION).is_file():
        folder = folder / FOLDER
    card = read_card(folder)
    if card.learner in (MEAN, SIGNED, STACKED):
        return _load_committee(folder, card, learner_fn)
    return _load_learner(folder, card, learner_fn)


def _load_committee(
    folder: Path, card: ModelCard, learner_fn: LearnerFactory | None
) -> Learner:
    count, signs = card.settings.get("members"), card.settings.get("signs")
    fits = type(count) is int and 1 <= count <= MAX_MEMBERS
    require_data(fits, OWNER, "members", f"from 1 to {MAX_MEMBERS}", f"{count!r:.80}")
    folders = [member_folder(folder, number) for number in range(int(count or 0))]
    # Linked to each other, few bytes on the disk would fill the memory.
    files = [one / name for one in folders for name in (DESCRIPTION, ARRAYS)]
    found = [file.stat() for file in files if file.is_file()]
    apart = len({(file.st_dev, file.st_ino) for file in found}) == len(found)
    require_data(apart, OWNER, "members", "files of their own", "links to the same one")
    # A member is a learner: committees of committees could go on without end.
    cards = [read_card(one) for one in folders]
    members = [
        _load_learner(one, own, learner_fn) for one, own in zip(folders, cards, strict=True)
    ]
    num_classes = len(card.classes)
    same = all(member.num_classes == num_classes for member in members)
    require_data(same, OWNER, "members", f"of {num_classes} classes", "others")
    if card.learner == MEAN:
        return MeanEnsemble(members, num_classes=num_classes, task=card.task)
    if card.learner == STACKED:
        weights = read_arrays(OWNER, folder / ARRAYS)
        return StackedEnsemble(members, weights, num_classes=num_classes)
    plain = isinstance(signs, list) and all(type(sign) is int for sign in signs)
    require_data(plain, OWNER, "signs", "1 and -1", f"{signs!r:.80}")
    names = [own.learner for own in cards]
    return SignedEnsemble(
        members, signs or [], names, num_classes=num_classes, task=card.task, model_fns={}
    )


def _load_learner(folder: Path, card: ModelCard, learner_fn: LearnerFactory | None) -> Learner:
    arrays = read_arrays(OWNER, folder / ARRAYS)
    learner = _named(card)() if learner_fn is None else learner_fn()
    fits, rule = learner.num_classes == len(card.classes), f"of {len(card.classes)} classes"
    require_data(fits, OWNER, "the learner", rule, learner.num_classes)
    _num_values(learner)  # names an impossible network before anything is made of it
    if isinstance(learner, DenseLearner):
        learner = learner.sized_for(arrays)
    needed, there = _num_values(learner), sum(array.size for array in arrays.values())
    require_data(needed in (None, there), OWNER, "the arrays", f"{needed} numbers", there)
    return require_portable(learner).from_arrays(arrays)


def read_card(folder: str | Path) -> ModelCard:
    """Return what ``model.json`` in a model's folder says."""
    path = Path(folder) / DESCRIPTION
    require_data(path.is_file(), OWNER, "path", f"a folder with {DESCRIPTION}", str(folder))
    size = path.stat().st_size
    small, rule = size <= MOST_DESCRIPTION_BYTES, f"at most {MOST_DESCRIPTION_BYTES} bytes"
    require_data(small, OWNER, DESCRIPTION, rule, size)
    try:
        content = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{OWNER}: {DESCRIPTION} must be JSON, got: {error}.") from error
    _check_content(content)
    return ModelCard(
        learner=content["learner"],
        row_shape=tuple(content["row-shape"]),
        classes=tuple(content["classes"]),
        task=content["task"],
        settings=content["settings"],
        version=content["version"],
    )


def _check_content(content: Any) -> None:
    is_object = isinstance(content, dict) and content.keys() == _KEYS.keys()
    require_data(is_object, OWNER, DESCRIPTION, f"an object with {', '.join(_KEYS)}", "another")
    for key, kind in _KEYS.items():
        fits = type(content[key]) is kind
        require_data(fits, OWNER, key, f"of type {kind.__name__}", f"{content[key]!r:.80}")
    require_data(content["format"] == FORMAT, OWNER, "format", f"{FORMAT}", content["format"])
    sides = content["row-shape"]
    whole = all(type(side) is int and side >= 1 for side in sides)
    fits = bool(sides) and whole and math.prod(sides) <= MAX_WIDTH
    rule = f"whole numbers from 1, of at most {MAX_WIDTH} together"
    require_data(fits, OWNER, "row-shape", rule, f"{sides!r:.80}")
    named = bool(content["classes"]) and all(type(name) is str for name in content["classes"])
    require_data(named, OWNER, "classes", "names", f"{content['classes']!r:.80}")
    tasks = get_args(Task)
    known = content["task"] in tasks
    require_data(known, OWNER, "task", f"one of {', '.join(tasks)}", content["task"])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _named(card: ModelCard) -> LearnerFactory:
    """Return the factory of a learner by its name; the settings are checked like a user's."""
    try:
        named: LearnerFactory = import_module(CATALOGUE).named_learner(
            card.learner,
            settings=card.settings,
            row_shape=card.row_shape,
            num_classes=len(card.classes),
            task=card.task,
        )
    except ModuleNotFoundError as error:
        raise InvalidData(
            f"{OWNER}: learner_fn must be given where the package 'simulations' is missing, "
            f"got none for {card.learner!r}."
        ) from error
    except StrategyError as error:
        reason = str(error)[:MOST_REASON]  # it quotes a name that may be a megabyte long
        raise InvalidData(f"{OWNER}: {DESCRIPTION} must name a learner. {reason}") from error
    return named


def _num_values(learner: Learner) -> int | None:
    """Return how many numbers a network learns, without memory for them; None for others."""
    make = getattr(learner, "module_fn", None)
    if make is None:
        return None
    try:
        state: dict[str, Array] = import_module("clients.networks.training").blank_state(make)
    except (RuntimeError, TypeError) as error:  # such as an image smaller than a kernel
        reason = str(error).partition("\n")[0]
        raise InvalidData(f"{OWNER}: the network must be possible, got: {reason}.") from error
    return sum(array.size for array in state.values())


def _native_files(model: Learner, arrays: Mapping[str, Array]) -> dict[str, bytes]:
    """Return what the model's own library reads, without any of our code."""
    booster = getattr(model, "booster", None)
    if booster is not None:
        return {XGBOOST: bytes(booster.save_raw("json"))}
    estimator = getattr(model, "fitted_estimator", None)
    if estimator is not None:  # for other programs, never read here: they say what they trust
        if find_spec("skops") is None:
            return {}
        dumps = import_module("skops.io").dumps
        return {SKOPS: dumps(estimator, compression=zipfile.ZIP_DEFLATED)}
    if not hasattr(model, "module_fn"):
        return {}
    torch, file = import_module("torch"), io.BytesIO()
    torch.save({name: torch.tensor(array) for name, array in arrays.items()}, file)
    return {TORCH: file.getvalue()}
