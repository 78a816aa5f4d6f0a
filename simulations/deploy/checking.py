"""A party's answers to questions that nobody has asked yet, for its operator to read.

They are decided by the code that decides in a run (`clients.app.check_question`), of
questions as servers send them. Nothing is trained, nothing leaves, and nothing is paid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flwr.app import ArrayRecord, ConfigRecord

from clients.app import PLAIN_CONFIG, check_question, client_app, role_of
from fl_strategies import REGISTRY, Party, PartyRole, WeightsParty, find_algorithm
from fl_strategies.errors import RequestRefused, StrategyError
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.wire import keys
from simulations.config import Settings, parse_assignments
from simulations.deploy.data import PublicData
from simulations.deploy.server_app import DeployedFederation, public_dataset
from simulations.federation import learns_numbers
from simulations.runtime.local import InMemoryGrid

ROLES: Final[Mapping[str, PartyRole]] = {
    **{name: algorithm.party for name, algorithm in REGISTRY.items()},
    FLOWER: WeightsParty(),
}


def questions(party: Party) -> Iterator[tuple[str, ConfigRecord]]:
    """Yield every form of every strategy, with a question that asks a party for it."""
    common: dict[str, Any] = {
        keys.NUM_CLASSES: party.num_classes,
        keys.NUM_PARTIES: 2,
        keys.SERVER_ROUND: 1,
        keys.SEED: 0,
        keys.ENCODING: party.encoding,
        "num-public": 1,
    }
    for name, algorithm in REGISTRY.items():
        options = algorithm.strategy.options_type
        for form, given in (algorithm.strategy.forms or {"": {}}).items():
            config = options.from_config(options.completed(given)).to_config()
            asked: dict[str, Any] = {**common, **config, keys.STRATEGY: name}
            yield f"{name} {form}".strip(), ConfigRecord(asked)
    yield FLOWER, ConfigRecord({**common, **PLAIN_CONFIG})


def describe(party: Party, public: PublicData) -> Iterator[str]:
    """Yield lines that say what a party takes part in and which models it can be given."""
    allowed, refused = _sorted_forms(party)
    yield f"allowed: {', '.join(allowed) or 'nothing'}"
    for rule, forms in refused.items():
        yield f"refused: {', '.join(forms)}: {rule}"
    yield f"limits: {party.policy.describe()}"
    readable = sorted({party.learner_name, *party.catalogue})
    yield f"reads models of: {', '.join(readable)}"
    for name in dict.fromkeys(form.partition(" ")[0] for form in allowed):
        final = _usual_final(name, public)
        if final and final not in readable:
            yield (
                f"cannot read: {final}, the usual final model of {name}; add it to receives, "
                f"or let the run have another final-learner"
            )


def _sorted_forms(party: Party) -> tuple[list[str], dict[str, list[str]]]:
    """Return which forms a party takes part in, and by which rules not in the others.

    Whether noise exceeds the signal depends on a run's settings, and is left out.
    """
    policy = replace(party.policy, allow_drowned_noise=True)
    asked = replace(party, policy=policy)
    allowed: list[str] = []
    refused: dict[str, list[str]] = {}
    for form, config in questions(party):
        name = form.partition(" ")[0]
        if not len(party.public) and name in REGISTRY and REGISTRY[name].strategy.needs_public:
            refused.setdefault("public rows must be given (public-file)", []).append(form)
            continue
        numeric = party.task == "regression" and name in REGISTRY
        if numeric and not learns_numbers(REGISTRY[name].strategy):
            refused.setdefault("labels must be classes", []).append(form)
            continue
        try:
            check_question(asked, ROLES[role_of(config, ROLES)], config)
        except RequestRefused as error:
            rule, _, _ = str(error).removeprefix(f"{party.owner}: ").rpartition(", got ")
            refused.setdefault(rule, []).append(form)
        else:
            allowed.append(form)
    return allowed, refused


def _usual_final(name: str, public: PublicData) -> str:
    """Return the model that a strategy gives everybody unless another one is asked for."""
    kind = find_algorithm(name).strategy if name in REGISTRY else None
    if kind is None or kind.same_learner or kind.relays_models or not kind.central:
        return ""
    settings = Settings.from_run_config({"strategy": name})
    try:
        return DeployedFederation(settings, public_dataset(public), []).final_learner
    except StrategyError:  # none that is installed here
        return ""


def ask(party: Party, public: PublicData, assignments: Sequence[str]) -> None:
    """Raise what the party would refuse the first question of a run with.

    Parameters
    ----------
    party : Party
    public : PublicData
        The public file, which the server has as well.
    assignments : sequence of str
        The run's settings, ``key=value``.
    """
    settings = Settings.from_run_config(parse_assignments(assignments))
    strategy = DeployedFederation(settings, public_dataset(public), []).strategy()
    grid = InMemoryGrid(client_app(lambda _: party), settings.num_parties)
    question, *_ = strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)
    config = question.content.config_records[keys.CONFIG]
    check_question(party, ROLES[role_of(config, ROLES)], config)
