"""The Flower client side: one function turns a party into a `ClientApp`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from clients.at_home import answers_openly, compare_at_home, verdict_to_tell
from clients.flower_messages import (
    PLAIN_CONFIG,
    error_reply,
    is_for_weights,
    is_plain,
    plain_figures,
    plain_model,
    plain_weights,
    refuse_useless,
    role_of,
)
from clients.kept_run import answer_once, run_name
from fl_strategies import (
    REGISTRY,
    Learner,
    Party,
    PartyRole,
    WeightsParty,
)
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.policy import Request, check_request
from fl_strategies.core.role import require_public_rows, require_readable
from fl_strategies.exceptions import (
    InvalidData,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    RequestRefused,
    StrategyError,
    UnsupportedLearner,
    require_known,
)
from fl_strategies.runtime._compat import warn_of_untested_flower
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.wire import keys
from fl_strategies.wire.compact import as_offered
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    Scalar,
    count_bytes,
)
from fl_strategies.wire.replies import EVALUATION

logger = logging.getLogger("flwr.fl_strategies")

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
    _check_request(party, role.request(party, config), releases=True)
    require_readable(party, config)


def _check_request(party: Party, request: Request, *, releases: bool) -> None:
    limit = party.journal.max_epsilon if party.journal is not None else None
    check_request(
        party.policy,
        request,
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
    _check_request(party, role.request(party, config), releases=False)
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
