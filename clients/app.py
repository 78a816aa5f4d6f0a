"""The Flower client side: messages in, answers out, state kept in between.

Messages of Flower's own strategies, from servers that know nothing of this package.

They hold weights as `arrays`, a `config` without the name of a strategy, and nothing else. An
answer is weights, or figures, and the number of examples that Flower weighs them by. No
epsilon is in it: Flower would average it. What a release costs is in the party's own journal.

What a party finds out for itself: whether the model of a run beats one of its own.

In a deployment nobody holds the data to compare, but each party holds its own. The answer is
a line of its own log. It leaves the party as one bit, and only if the party says so.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.kept_run import answer_once, run_name
from fl_strategies import (
    REGISTRY,
    Learner,
    Party,
    PartyRole,
    WeightsParty,
)
from fl_strategies._compat import warn_of_untested_flower
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import (
    InvalidData,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    RequestRefused,
    StrategyError,
    UnsupportedLearner,
    require_known,
)
from fl_strategies.learners import METRICS, StartingLearner, judge, paired_error
from fl_strategies.party.party import check_request
from fl_strategies.party.role import (
    PartyState,
    read_seed,
    require_public_rows,
    require_readable,
)
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.release import ReleasePlan
from fl_strategies.server.replies import EVALUATION
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.strategies.weights.restraint import as_layout
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    Scalar,
    as_offered,
    count_bytes,
    decode_arrays,
    encode_arrays,
)

CLIENT_APP_RAISED_EXCEPTION: Final = 2
"""Flower's error code for a client that failed by itself."""
PLAIN_CONFIG: Final[Mapping[str, str | int]] = {
    keys.STRATEGY: FLOWER,
    keys.SEED: 0,
    "local-epochs": 1,
}
"""Defaults of a message of Flower's own strategies."""
_FOR_WEIGHTS: Final = (
    "LocalDpMod",
    "adaptiveclipping_mod",
    "fixedclipping_mod",
    "secagg_mod",
    "secaggplus_mod",
)


def error_reply(message: Message, reason: str) -> Message:
    """Return an answer that says why there is none."""
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def is_plain(message: Message) -> bool:
    """Return whether a message comes from one of Flower's own strategies."""
    config = message.content.get(keys.CONFIG)
    return isinstance(config, ConfigRecord) and keys.STRATEGY not in config


def role_of(config: ConfigRecord, roles: Mapping[str, PartyRole]) -> str:
    """Return which role answers a strategy; one does for all that are Flower's."""
    name = str(config.get(keys.STRATEGY))
    return FLOWER if name not in roles and name.startswith(f"{FLOWER}:") else name


def plain_model(message: Message, party: Party) -> Knowledge | None:
    """Return the weights that came, in the types of the party's own; None for none at all.

    Flower's means turn whole numbers, such as the counters of a normalisation, into others.
    """
    record = message.content.get(keys.ARRAYS)
    if not isinstance(record, ArrayRecord) or not record:
        return None
    arrays = decode_arrays(record, MAX_REPLY_BYTES)
    learner = party.learner_fn()
    if isinstance(learner, StartingLearner):
        own = learner.initialised(rng=np.random.default_rng(0)).to_arrays()
        typed = as_layout(arrays, own)
        arrays = {name: typed[name] for name in arrays}
    return Knowledge("model", arrays, {keys.LEARNER: party.learner_name})


def plain_weights(received: Knowledge | None, sent: Knowledge) -> RecordDict:
    """Return weights in the order in which they came, and how many records they have seen."""
    names = sent.arrays if received is None else received.arrays
    arrays = encode_arrays({name: sent.arrays[name] for name in names})
    count = MetricRecord({keys.NUM_EXAMPLES: sent.meta[keys.NUM_EXAMPLES]})  # type: ignore[dict-item]
    return RecordDict({keys.ARRAYS: arrays, keys.METRICS: count})


def plain_figures(party: Party, figures: Metrics) -> RecordDict:
    """Return what was measured; raise if that is nothing, which Flower cannot average."""
    if not figures[keys.NUM_EXAMPLES]:
        raise RequestRefused(
            f"{party.owner}: a model must be measured at home only, got a request for figures."
        )
    return RecordDict({keys.METRICS: MetricRecord({**figures})})


def refuse_useless(mods: Sequence[Mod], roles: Mapping[str, PartyRole]) -> Mod:
    """Return a mod that refuses messages for which others would protect nothing."""
    useless = [_name(mod) for mod in mods if is_for_weights(mod)]

    def refuse(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = message.content.get(keys.CONFIG)
        named = isinstance(config, ConfigRecord) and not is_plain(message)
        if useless and named and isinstance(config, ConfigRecord):
            role = roles.get(role_of(config, roles))
            if not isinstance(role, WeightsParty):
                return error_reply(
                    message,
                    f"ClientApp: mods must be none that work on weights for "
                    f"{str(config[keys.STRATEGY])[:40]}, which sends none, got "
                    f"{', '.join(useless)}. Use the strategy's own privacy options.",
                )
        return call_next(message, context)

    return refuse


def is_for_weights(mod: Mod) -> bool:
    """Return whether a mod is one of Flower's that change the weights of an answer."""
    return _name(mod) in _FOR_WEIGHTS


def _name(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


logger = logging.getLogger("flwr.fl_strategies")


def compare_at_home(
    model: Learner, party: Party, config: ConfigRecord, state: PartyState
) -> bool | None:
    """Log whether a model beats the party's own on its held-out rows; None if unknown.

    It does if its figure is better by more than one standard error of the difference. An
    error is logged and goes no further: what is answered must not depend on it.
    """
    x, y = party.x_test, party.y_test
    if not party.compare_at_home or x is None or y is None or not len(y):
        return None
    try:
        own = _shares_alone(party, x, y, config, state)
        return _log(party, judge(model, x, y, party.task).shares, own)
    except Exception:
        logger.exception("The model of the run could not be compared with one of its own.")
        return None


def verdict_to_tell(party: Party, better: bool | None, told: Metrics) -> Metrics:
    """Return the one bit if the party tells it, and its metrics as well."""
    if not party.tell_verdict or math.isnan(told[METRICS[party.task]]):
        return {}
    return {keys.BETTER_THAN_ALONE: math.nan if better is None else float(better)}


def answers_openly(state: PartyState) -> bool:
    """Tell whether the party has released something in this run, and all without noise."""
    released = [event for event, _ in state.ledger(DEFAULT_DELTA).entries]
    return bool(released) and all(isinstance(event, NonPrivateEvent) for event in released)


def _shares_alone(
    party: Party, x: Array, y: Array, config: ConfigRecord, state: PartyState
) -> FloatArray:
    """Judge a model that learned from the party's records only; trained once a run."""
    if state.alone is not None:
        return state.alone
    rng = party.rng(read_seed(config), "alone")
    shares = judge(party.learner_fn().fit(party.x, party.y, rng=rng), x, y, party.task).shares
    state.alone = shares
    return shares


def _log(party: Party, received: FloatArray, own: FloatArray) -> bool:
    sign = -1 if party.task == "regression" else 1
    gain, error = sign * (received.mean() - own.mean()), paired_error(received, own)
    better = bool(gain > error)
    word = "better than" if better else "worse than" if -gain > error else "level with"
    logger.info(
        "%s: the model of this run is %s one of its own: %s %.4g against %.4g on %d held-out "
        "rows.",
        party.owner,
        word,
        METRICS[party.task],
        received.mean(),
        own.mean(),
        len(own),
    )
    return better


LoadParty: TypeAlias = Callable[[Context], Party]
OnModel: TypeAlias = Callable[[Learner, Party, Context], None]


def client_app(
    load_party: LoadParty,
    *,
    on_model: OnModel | None = None,
    roles: Mapping[str, PartyRole] | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Return a ready `ClientApp` that answers our strategies, and Flower's own.

    Parameters
    ----------
    load_party : callable
        Builds the party from Flower's context. Flower starts client code anew for each
        message, so this is called once per message.
    on_model : callable, optional
        Receives the final model when the server delivers it, for example to save it.
    roles : mapping of strategy name to party role, optional
        Which strategies this party takes part in; all of the registry by default, and as
        ``"flower"`` those of Flower that average weights.
    mods : sequence of Flower's mods, optional
        What messages pass before and after. Those that clip, blur or mask weights see
        training only; where no weights travel they protect nothing, and the party refuses.

    Notes
    -----
    What is wrong with a request travels to the server as one sentence. Of everything else
    that may go wrong the server learns a sentence that is always the same, because the text,
    and even the type, of an error may depend on a record; the party's own log has it all.
    """
    warn_of_untested_flower()
    every = {name: algorithm.party for name, algorithm in REGISTRY.items()}
    known = roles or {**every, FLOWER: WeightsParty()}
    everywhere = [mod for mod in mods if not is_for_weights(mod)]
    app = ClientApp()

    @app.train(mods=[refuse_useless(mods, known), *mods])
    def train(message: Message, context: Context) -> Message:
        return _guarded(message, lambda: _train(message, context, load_party, known))

    @app.evaluate(mods=everywhere)
    def evaluate(message: Message, context: Context) -> Message:
        return _guarded(
            message, lambda: _evaluate(message, context, load_party, known, on_model)
        )

    return app


FAILED: Final = "The party could not answer; its own log says why."
NO_BUDGET: Final = "The party's privacy budget does not allow this answer."


def _guarded(message: Message, respond: Callable[[], RecordDict]) -> Message:
    try:
        return Message(respond(), reply_to=message)
    except (KnowledgeMismatch, RequestRefused, UnsupportedLearner) as error:
        # These are about the request and the party's settings, never about a record.
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        reason = str(error)
    except PrivacyBudgetExceeded as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        reason = NO_BUDGET
    except StrategyError as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        reason = FAILED
    except Exception:
        logger.exception("The party failed.")
        reason = FAILED
    return error_reply(message, reason)


def check_question(party: Party, role: PartyRole, config: ConfigRecord) -> None:
    """Raise what a party refuses a question with, before it looks at a record or pays.

    That is decided by the question and the party's own settings alone.
    """
    _check_request(party, role.plan(party, config), releases=True)
    require_readable(party, config)


def _check_request(party: Party, plan: ReleasePlan, *, releases: bool) -> None:
    limit = party.journal.max_epsilon if party.journal is not None else None
    check_request(
        party.policy,
        plan,
        owner=party.owner,
        budgeted=limit is not None,
        releases=releases,
    )


def _train(
    message: Message, context: Context, load_party: LoadParty, roles: Mapping[str, PartyRole]
) -> RecordDict:
    config, role = _read_request(message, roles)
    party = _load(load_party, context, config)
    check_question(party, role, config)
    received = _received(message, party)

    def respond() -> RecordDict:
        if party.journal is not None:
            party.journal.require_budget()
        state = PartyState(context.state)
        knowledge, metrics = role.train(party, received, config, state)
        if is_plain(message):
            return plain_weights(received, knowledge)
        metrics = {keys.NUM_EXAMPLES: len(party.y), **metrics}
        return _reply(message, party, knowledge, metrics)

    return answer_once(party, message, context, respond)


def _evaluate(
    message: Message,
    context: Context,
    load_party: LoadParty,
    roles: Mapping[str, PartyRole],
    on_model: OnModel | None,
) -> RecordDict:
    config, role = _read_request(message, roles)
    party = _load(load_party, context, config)
    _check_request(party, role.plan(party, config), releases=False)
    received = _received(message, party)
    if received is None:
        raise KnowledgeMismatch("Server: an evaluate message must carry a model, got none.")

    def respond() -> RecordDict:
        state = PartyState(context.state)
        is_open = answers_openly(state) and not role.promises(party, config, state)
        model, metrics = role.evaluate(party, received, config, state)
        if on_model is not None:
            on_model(model, party, context)
        better = compare_at_home(model, party, config, state)
        if is_plain(message):
            return plain_figures(party, metrics)
        if is_open:
            metrics |= verdict_to_tell(party, better, metrics)
        return _reply(message, party, Knowledge(EVALUATION, {}), metrics)

    return answer_once(party, message, context, respond)


def _load(load_party: LoadParty, context: Context, config: ConfigRecord) -> Party:
    """Return the party; a run that is resumed after a kill is the same run for it."""
    try:
        party = load_party(context)
    except (KnowledgeMismatch, UnsupportedLearner) as error:
        # Whatever is wrong here is about private files, records and settings.
        raise InvalidData(str(error)) from error
    party.check_learners()
    require_public_rows(party, config)
    name = run_name(config)
    return party if name is None else replace(party, run=name)


def _read_request(
    message: Message, roles: Mapping[str, PartyRole]
) -> tuple[ConfigRecord, PartyRole]:
    config = message.content.get(keys.CONFIG)
    if not isinstance(config, ConfigRecord):
        raise KnowledgeMismatch(f"Server: the message must hold {keys.CONFIG!r}, got none.")
    if is_plain(message):
        config = ConfigRecord({**PLAIN_CONFIG, **config})
    name = role_of(config, roles)
    rule = f"one this party takes part in ({', '.join(sorted(roles))})"
    require_known(name in roles, "Server", "strategy", rule, repr(name))
    return config, roles[name]


def _received(message: Message, party: Party) -> Knowledge | None:
    if keys.ARRAYS not in message.content:
        return None
    if is_plain(message):
        return plain_model(message, party)
    meta = message.content.get(keys.META)
    kind = str(meta.get(keys.KIND)) if isinstance(meta, ConfigRecord) else ""
    return Knowledge.read(message.content, kind=kind, max_bytes=MAX_REPLY_BYTES)


def _reply(
    message: Message, party: Party, knowledge: Knowledge, metrics: Metrics
) -> RecordDict:
    identity: dict[str, Scalar] = {
        keys.PARTITION_ID: party.partition_id,
        keys.LEARNER: party.learner_name,
    }
    sent = as_offered(knowledge, message.content.config_records[keys.CONFIG])
    content = RecordDict()
    Knowledge(sent.kind, sent.arrays, {**identity, **sent.meta}).write(content)
    received = count_bytes(message.content)
    record = MetricRecord(
        {**metrics, keys.NUM_BYTES_RECEIVED: received, keys.NUM_BYTES_SENT: 0}
    )
    content[keys.METRICS] = record
    # The size of a number does not depend on its value, so it can be filled in last.
    record[keys.NUM_BYTES_SENT] = count_bytes(content)
    return content
