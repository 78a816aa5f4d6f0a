"""The party's side of a deployed federation: everything it is, its own node-config says.

Nothing that a server sends chooses a file, a folder, a model's code or a budget here, and
what leaves is what the party's policy allows. The run's configuration is not read at all.
"""

import functools
import importlib
import io
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Context

from clients.app import client_app, forget_oldest
from fl_strategies import REGISTRY, Learner, Party, PortableLearner
from fl_strategies._util import Array, make_folder, replace_file
from fl_strategies.errors import InvalidData, StrategyError, require
from fl_strategies.learners import LearnerFactory
from fl_strategies.options import Setting, key_of
from fl_strategies.party.party import PartyPolicy
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.wire import keys
from simulations.config import Value
from simulations.data.encoded import Encoding, check_encoder
from simulations.data.schema import Schema
from simulations.data.tables import names_in
from simulations.deploy.data import (
    LABEL,
    PublicData,
    check_classes,
    class_list,
    declared,
    read_labelled,
    read_public,
)
from simulations.models import (
    CLASSIFIERS,
    ModelOptions,
    check_learner_name,
    learner_factory,
)
from simulations.runtime.client_app import OWNER, Budget, require_absolute

MAX_RUN_EPSILON: Final = "max-run-epsilon"
POLICY_KEYS: Final[Mapping[str, Value]] = {
    **{key_of(field.name): getattr(PartyPolicy(), field.name) for field in fields(PartyPolicy)},
    "strategies": "",
}
"""Keys of a node's policy, with their defaults."""
FORMS: Final = (
    *REGISTRY,
    FLOWER,
    *(f"{name} {form}" for name, one in REGISTRY.items() for form in one.strategy.forms),
)
"""Permissions of a policy, by name."""


def policy_of(config: Mapping[str, Value], *, limited: bool) -> PartyPolicy:
    """Return the policy that a complete node-config describes.

    Parameters
    ----------
    config : mapping
    limited : bool
        Whether the node itself names `max-run-epsilon`, which contradicts
        `allow-unprotected`; the default does not.
    """
    is_open = bool(config["allow-unprotected"])
    rule = "omitted with allow-unprotected: what has no noise costs more than any number"
    require(not (is_open and limited), OWNER, MAX_RUN_EPSILON, rule, config[MAX_RUN_EPSILON])
    named = names_in(str(config["strategies"]))
    for name in named:
        require(name in FORMS, OWNER, "strategies", f"among {', '.join(FORMS)}", name)
    given: dict[str, Any] = {key.replace("-", "_"): config[key] for key in POLICY_KEYS}
    if is_open:
        given["max_run_epsilon"] = None
    return PartyPolicy(**{**given, "strategies": named})


logger = logging.getLogger("flwr.fl_strategies")

DEFAULTS: Final[Mapping[str, Value]] = {
    keys.PARTITION_ID: -1,
    keys.NUM_PARTITIONS: 0,
    "data-file": "",
    "public-file": "",
    "test-file": "",
    "classes": "",
    "label": LABEL,
    "task": "auto",
    "drop": "",
    "encoder": "",
    "standardise": False,
    "schema": "",
    "learner": "",
    "teacher": "",
    "receives": "extra-trees, random-features",
    "compare": True,
    "tell-verdict": False,
    **{key: setting.default for key, setting in Budget.settings().items()},
    **POLICY_KEYS,
}
"""Keys of a node config, with their defaults."""
HEADS: Final = ("logistic-regression", "ridge", "moments")
MODEL_SETTINGS: Final = tuple(ModelOptions.settings())
"""Settings of models, which a party chooses for itself as well."""


def load_party(context: Context) -> Party:
    """Return the party of this node."""
    return build_party(context.node_config, run=str(context.run_id))


def build_party(node_config: Mapping[str, Value], *, run: str) -> Party:
    """Return the party that a node-config describes."""
    config = checked(node_config)
    public, label = party_public(config), label_of(config)
    x, y = read_labelled(_file(config, "data-file"), public, label)
    held_out: tuple[Array | None, Array | None] = (None, None)
    if config["test-file"]:
        held_out = read_labelled(_file(config, "test-file"), public, label)
    learner, teacher = str(config["learner"]), str(config["teacher"])
    # Linear models can be read by every party: a few numbers for each column and class.
    received = dict.fromkeys([*names_in(str(config["receives"])), *HEADS])
    if public.task == "regression":
        received = {name: None for name in received if name not in CLASSIFIERS}
    return Party(
        x=x,
        y=y,
        public=public.x,
        public_y=public.y,
        num_classes=len(public.classes),
        task=public.task,
        learner_fn=party_factory(learner, "learner", public, config),
        teacher_fn=party_factory(teacher, "teacher", public, config) if teacher else None,
        learner_name=learner,
        partition_id=int(config[keys.PARTITION_ID]),
        x_test=held_out[0],
        y_test=held_out[1],
        catalogue={name: party_factory(name, "receives", public, config) for name in received},
        journal=Budget.of_node(config).journal(x, y),
        run=run,
        compare_at_home=bool(config["compare"]),
        tell_verdict=bool(config["tell-verdict"]),
        encoding=public.encoding,
        policy=policy_of(config, limited=MAX_RUN_EPSILON in node_config),
    )


def party_public(config: Mapping[str, Value]) -> PublicData:
    """Read the public file that a node-config names, or a schema, or both."""
    if config["schema"]:
        path = _file(config, "public-file") if config["public-file"] else None
        classes = class_list(str(config["classes"])) if config["classes"] else ()
        return declared(path, Schema.load(str(config["schema"])), classes, str(config["drop"]))
    numbers = config["task"] == "numbers"
    return read_public(
        _file(config, "public-file"),
        () if numbers else class_list(str(config["classes"])),
        str(config["label"]),
        str(config["drop"]),
        Encoding.of(str(config["encoder"]), standardise=bool(config["standardise"])),
        numbers=numbers,
    )


def label_of(config: Mapping[str, Value]) -> str:
    """Return the column with the class: the schema's if there is one."""
    label = str(config["label"])
    if not config["schema"]:
        return label
    return Schema.load(str(config["schema"])).label_name("" if label == LABEL else label)


def understood(node_config: Mapping[str, Value]) -> list[str]:
    """Describe a party's columns or records, as the public file defines them."""
    return party_public(checked(node_config)).describe()


def checked(node_config: Mapping[str, Value]) -> dict[str, Value]:
    """Return the node-config with defaults filled in; a key nobody knows is an error.

    A budget that a typing mistake hides must not go unnoticed.
    """
    unknown = sorted(set(node_config) - {*DEFAULTS, *MODEL_SETTINGS})
    require(not unknown, OWNER, "keys", f"among {', '.join(DEFAULTS)}", unknown)
    whole = {**DEFAULTS, **node_config}
    config = {
        key: Setting(key, type(default), default, "", (), False).check(OWNER, whole[key])
        for key, default in DEFAULTS.items()
    } | {key: whole[key] for key in MODEL_SETTINGS if key in whole}
    by_schema = () if config["schema"] else ("public-file",)
    for key in ("data-file", *by_schema, "learner"):
        require(bool(config[key]), OWNER, key, "given", config[key])
    check_classes(OWNER, config)
    number_of_party = int(config[keys.PARTITION_ID])
    require(number_of_party >= 0, OWNER, keys.PARTITION_ID, "at least 0", number_of_party)
    check_encoder(OWNER, str(config["encoder"]), standardise=bool(config["standardise"]))
    one, rule = not (config["encoder"] and config["schema"]), "omitted with a schema"
    require(one, OWNER, "encoder", rule, config["encoder"])
    compared = bool(config["compare"]) or not config["tell-verdict"]
    require(compared, OWNER, "tell-verdict", "false without compare", True)
    for key in ("data-file", "public-file", "test-file", "schema"):
        require_absolute(key, str(config[key]))
    return config


def party_factory(
    name: str, parameter: str, public: PublicData, config: Mapping[str, Value]
) -> LearnerFactory:
    """Return the factory of a model: one by its name, or the party's own ``module:function``.

    The function is called with ``row_shape`` and ``num_classes`` and returns a learner.
    """
    if ":" not in name:
        check_learner_name(OWNER, parameter, name)
        given = {key: config[key] for key in MODEL_SETTINGS if key in config}
        return learner_factory(
            name,
            row_shape=public.row_shape,
            num_classes=len(public.classes),
            settings=ModelOptions.from_config(given),
            task=public.task,
        )
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidData(
            f"{OWNER}: {parameter} must name a function that the party can import, "
            f"got {name!r}: {error}."
        ) from error
    factory: LearnerFactory = functools.partial(
        make, row_shape=public.row_shape, num_classes=len(public.classes)
    )
    return factory


def save_model(model: Learner, party: Party, context: Context) -> None:
    """Keep the model that the run has given this party in its state folder."""
    if party.journal is None or not isinstance(model, PortableLearner):
        return
    path = party.journal.folder / f"model-{context.run_id}.npz"
    file = io.BytesIO()
    try:
        np.savez_compressed(file, **model.to_arrays())  # type: ignore[arg-type]
        make_folder(path.parent)
        replace_file(path, file.getvalue())
        forget_oldest(path, "model-[0-9]*.npz")
    except StrategyError as error:  # models without an array form
        logger.info("%s", error)
    except OSError as error:
        logger.warning("The model of run %s is not kept: %s.", context.run_id, error.strerror)


def _file(config: Mapping[str, Value], key: str) -> Path:
    path = Path(str(config[key])).expanduser()
    require(path.is_file(), OWNER, key, "a file that exists", str(path))
    return path


app = client_app(load_party, on_model=save_model)
