"""The Flower client side: messages in, answers out, state kept in between.

Messages of Flower's own strategies, from servers that know nothing of this package, hold
weights as `arrays`, a `config` without the name of a strategy, and nothing else. An answer is
weights, or metrics, and the number of examples that Flower weighs them by. No epsilon is in it:
Flower would average it. What a release costs is in the party's own journal.

**Runs on disk.** Flower holds a node's state in memory and per run. A party with a journal also
keeps it in ``runs/`` beside the journal, under the name that the run has for its server,
together with its last answers: a request that is repeated, because an answer was lost on its
way, gets the same answer, and nothing more is spent. What is kept belongs to the very records
it was learned from. A sample that was paid for one set of records pays for no other, so if the
data have changed, the party begins anew.

**Comparison at home.** In a deployment nobody holds the data to compare, but each party holds
its own: whether the model of a run beats one of the party's own is a line of its own log. It
leaves the party as one bit, and only if the party says so.
"""

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

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

from fl_strategies import REGISTRY, Learner, Party, PartyRole, WeightsParty, _compat
from fl_strategies._util import Array, FloatArray, make_folder, replace_file, require_argument
from fl_strategies.errors import (
    InvalidData,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    RequestRefused,
    StrategyError,
    UnsupportedLearner,
    require,
    require_data,
    require_known,
)
from fl_strategies.learners import METRICS, StartingLearner, evaluate_model, paired_error
from fl_strategies.party.party import check_request, is_missing
from fl_strategies.party.role import (
    PartyState,
    check_encoding,
    read_seed,
    require_public_rows,
    require_readable,
)
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.server.replies import EVALUATION
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.strategies.weights.restraint import as_layout
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    as_offered,
    count_bytes,
    decode_arrays,
    encode_arrays,
)

logger = logging.getLogger("flwr.fl_strategies")

LoadData: TypeAlias = Callable[[int, int], Sequence[Any]]
LoadParty: TypeAlias = Callable[[Context], Party]
OnModel: TypeAlias = Callable[[Learner, Party, Context], None]

PARTY_LOADER: Final = "party_loader"
CLIENT_APP_RAISED_EXCEPTION: Final = 2
"""Flower's error code for a client that failed by itself."""
FAILED: Final = "The party could not answer; its own log says why."
NO_BUDGET: Final = "The party's privacy budget does not allow this answer."
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
    _compat.warn_of_untested_flower()
    every = {name: algorithm.party for name, algorithm in REGISTRY.items()}
    known = roles or {**every, FLOWER: WeightsParty()}
    for_weights = [mod for mod in mods if _name(mod) in _FOR_WEIGHTS]
    everywhere = [mod for mod in mods if _name(mod) not in _FOR_WEIGHTS]
    app = ClientApp()

    @app.train(mods=[_refuse_useless(for_weights, known), *mods])
    def train(message: Message, context: Context) -> Message:
        return _guarded(message, lambda: _train(message, context, load_party, known))

    @app.evaluate(mods=everywhere)
    def evaluate(message: Message, context: Context) -> Message:
        return _guarded(
            message, lambda: _evaluate(message, context, load_party, known, on_model)
        )

    return app


def _refuse_useless(for_weights: Sequence[Mod], roles: Mapping[str, PartyRole]) -> Mod:
    """Return a mod that refuses messages for which those for weights would protect nothing."""

    def refuse(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = message.content.get(keys.CONFIG)
        if for_weights and isinstance(config, ConfigRecord) and keys.STRATEGY in config:
            role = roles.get(role_of(config, roles))
            if not isinstance(role, WeightsParty):
                return _error_reply(
                    message,
                    f"ClientApp: mods must be none that work on weights for "
                    f"{str(config[keys.STRATEGY])[:40]}, which sends none, got "
                    f"{', '.join(map(_name, for_weights))}. Use the strategy's own privacy "
                    "options.",
                )
        return call_next(message, context)

    return refuse


def _name(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


def _guarded(message: Message, respond: Callable[[], RecordDict]) -> Message:
    try:
        return Message(respond(), reply_to=message)
    except StrategyError as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        if isinstance(error, KnowledgeMismatch | RequestRefused | UnsupportedLearner):
            # These are about the request and the party's settings, never about a record.
            return _error_reply(message, str(error))
        spent = isinstance(error, PrivacyBudgetExceeded)
        return _error_reply(message, NO_BUDGET if spent else FAILED)
    except Exception:
        logger.exception("The party failed.")
        return _error_reply(message, FAILED)


def _error_reply(message: Message, reason: str) -> Message:
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


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
        if _is_plain(message):
            return _plain_weights(received, knowledge)
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
    check_question(party, role, config, releases=False)
    received = _received(message, party)
    if received is None:
        raise KnowledgeMismatch("Server: an evaluate message must carry a model, got none.")

    def respond() -> RecordDict:
        state = PartyState(context.state)
        is_open = _answers_openly(state) and not role.promises(party, config, state)
        model, metrics = role.evaluate(party, received, config, state)
        if on_model is not None:
            on_model(model, party, context)
        better = compare_at_home(model, party, config, state)
        if _is_plain(message):
            if not metrics[keys.NUM_EXAMPLES]:  # Flower cannot average nothing
                raise RequestRefused(
                    f"{party.owner}: a model must be measured at home only, got a request for "
                    "metrics."
                )
            return RecordDict({keys.METRICS: MetricRecord({**metrics})})
        if is_open and party.tell_verdict and not math.isnan(metrics[METRICS[party.task]]):
            metrics[keys.BETTER_THAN_ALONE] = math.nan if better is None else float(better)
        return _reply(message, party, Knowledge(EVALUATION, {}), metrics)

    return answer_once(party, message, context, respond)


def _read_request(
    message: Message, roles: Mapping[str, PartyRole]
) -> tuple[ConfigRecord, PartyRole]:
    config = message.content.get(keys.CONFIG)
    if not isinstance(config, ConfigRecord):
        raise KnowledgeMismatch(f"Server: the message must hold {keys.CONFIG!r}, got none.")
    if _is_plain(message):
        config = ConfigRecord({**PLAIN_CONFIG, **config})
    name = role_of(config, roles)
    rule = f"one this party takes part in ({', '.join(sorted(roles))})"
    require_known(name in roles, "Server", "strategy", rule, repr(name))
    return config, roles[name]


def role_of(config: ConfigRecord, roles: Mapping[str, PartyRole]) -> str:
    """Return the name of the role that answers a strategy; one does for all of Flower's."""
    name = str(config.get(keys.STRATEGY))
    return FLOWER if name not in roles and name.startswith(f"{FLOWER}:") else name


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


def check_question(
    party: Party, role: PartyRole, config: ConfigRecord, *, releases: bool = True
) -> None:
    """Raise what a party refuses a question with, before it looks at a record or pays.

    That is decided by the question and the party's own settings alone.
    """
    if config[keys.STRATEGY] != FLOWER:  # whose servers know nothing of encoders
        check_encoding(party, config)
    check_request(
        party.policy,
        role.plan(party, config),
        owner=party.owner,
        budgeted=party.journal is not None and party.journal.max_epsilon is not None,
        releases=releases,
    )
    if releases:
        require_readable(party, config)


def _received(message: Message, party: Party) -> Knowledge | None:
    if keys.ARRAYS not in message.content:
        return None
    if _is_plain(message):
        return _plain_model(message, party)
    meta = message.content.get(keys.META)
    kind = str(meta.get(keys.KIND)) if isinstance(meta, ConfigRecord) else ""
    return Knowledge.read(message.content, kind=kind, max_bytes=MAX_REPLY_BYTES)


def _reply(
    message: Message, party: Party, knowledge: Knowledge, metrics: Metrics
) -> RecordDict:
    sent = as_offered(knowledge, message.content.config_records[keys.CONFIG])
    meta = {
        keys.PARTITION_ID: party.partition_id,
        keys.LEARNER: party.learner_name,
        **sent.meta,
    }
    content = RecordDict()
    Knowledge(sent.kind, sent.arrays, meta).write(content)
    received = count_bytes(message.content)
    record = MetricRecord(
        {**metrics, keys.NUM_BYTES_RECEIVED: received, keys.NUM_BYTES_SENT: 0}
    )
    content[keys.METRICS] = record
    # The size of a number does not depend on its value, so it can be filled in last.
    record[keys.NUM_BYTES_SENT] = count_bytes(content)
    return content


def _is_plain(message: Message) -> bool:
    """Return whether a message comes from one of Flower's own strategies."""
    config = message.content.get(keys.CONFIG)
    return isinstance(config, ConfigRecord) and keys.STRATEGY not in config


def _plain_model(message: Message, party: Party) -> Knowledge | None:
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


def _plain_weights(received: Knowledge | None, sent: Knowledge) -> RecordDict:
    """Return weights in the order in which they came, and how many records they have seen."""
    names = sent.arrays if received is None else received.arrays
    arrays = encode_arrays({name: sent.arrays[name] for name in names})
    count = MetricRecord({keys.NUM_EXAMPLES: sent.meta[keys.NUM_EXAMPLES]})  # type: ignore[dict-item]
    return RecordDict({keys.ARRAYS: arrays, keys.METRICS: count})


MAX_RUNS: Final = 8
"""Most runs that are kept; the one that was used longest ago goes first."""
_RUN_NAME: Final = re.compile("[0-9a-f]{32}")
_CHECKSUM_BYTES: Final = 32
_STATE, _ANSWER, _QUESTION = "state", "answer", "question"


class KeptRun:
    """One run of one party on disk.

    Parameters
    ----------
    folder : Path
        The party's own; nothing that a server sends is part of a path, but for the name of
        a run, which is 32 hexadecimal digits.
    name : str
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.run"
        self._records = self._read()

    @property
    def state(self) -> RecordDict | None:
        """State of the party's role after its last answer, or None."""
        return self._below(_STATE) if self._records is not None else None

    def answer(self, kind: str, question: str) -> RecordDict | None:
        """Return the last answer of this kind, if it was to the same question."""
        asked = (self._records or RecordDict()).get(f"{_QUESTION}/{kind}")
        same = isinstance(asked, ConfigRecord) and asked.get("id") == question
        return self._below(f"{_ANSWER}/{kind}") if same else None

    def keep(self, kind: str, question: str, answer: RecordDict, state: RecordDict) -> None:
        """Write state and answer, both or neither; a full disk is no reason not to answer."""
        mine = (f"{_STATE}/", f"{_ANSWER}/{kind}/")
        old = (self._records or RecordDict()).items()
        records = RecordDict({key: r for key, r in old if not key.startswith(mine)})
        for key, record in state.items():
            records[f"{_STATE}/{key}"] = record
        for key, record in answer.items():
            records[f"{_ANSWER}/{kind}/{key}"] = record
        records[f"{_QUESTION}/{kind}"] = ConfigRecord({"id": question})
        try:
            make_folder(self.path.parent)
            content = _compat.records_to_bytes(records)
            replace_file(self.path, hashlib.sha256(content).digest() + content)
            forget_oldest(self.path, "*.run")
        except OSError as error:
            logger.warning(
                "The run is not kept, so a restart would fall back behind this answer: %s.",
                error.strerror,
            )
        self._records = records

    def _below(self, prefix: str) -> RecordDict:
        records = (self._records or RecordDict()).items()
        start = f"{prefix}/"
        return RecordDict({k.removeprefix(start): r for k, r in records if k.startswith(start)})

    def _read(self) -> RecordDict | None:
        if not self.path.exists():
            return None
        data = self.path.read_bytes()
        checksum, content = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        if checksum != hashlib.sha256(content).digest():
            # What was spent is in the journal, so nothing is lost but work.
            logger.warning("%s is damaged; the party begins this run anew.", self.path.name)
            return None
        return _compat.records_from_bytes(content)


def run_name(config: ConfigRecord) -> str | None:
    """Return the name that a resumable run has for its server, or None."""
    name = config.get(keys.RUN_NAME)
    return name if isinstance(name, str) and _RUN_NAME.fullmatch(name) else None


def answer_once(
    party: Party, message: Message, context: Context, respond: Callable[[], RecordDict]
) -> RecordDict:
    """Respond with the state of the last answer, or repeat the answer to the same question.

    A party without a journal keeps nothing and responds.
    """
    if party.journal is None:
        return respond()
    name = run_name(message.content.config_records[keys.CONFIG])
    run = KeptRun(
        party.journal.folder / "runs",
        f"{name or f'flower-{context.run_id}'}.{party.journal.path.stem}",
    )
    data = f"{run.path.name} {party.journal.fingerprint}"
    kind = message.metadata.message_type
    question = f"{message.content.object_id} {data} {party.learner_name}"
    known = run.answer(kind, question)
    if known is not None:
        logger.info("This was asked before; the answer is the same and costs nothing.")
        return known
    number = _restore(context.state, run.state or RecordDict(), data)
    answer = respond()
    state = PartyState(context.state)
    state.answered_for, state.num_answers = data, number + 1
    run.keep(kind, question, answer, context.state)
    return answer


def _restore(memory: RecordDict, disk: RecordDict, data: str) -> int:
    """Put the newest state of this run and data into memory; return how many answers it had.

    Memory is newer if the disk was full. At the same number the disk is right: memory may
    hold what a question left behind that was refused.
    """
    newest, records = 0, {}
    for kept in (memory, disk):
        state = PartyState(kept)
        if state.answered_for == data and state.num_answers >= max(newest, 1):
            newest, records = state.num_answers, dict(kept.items())
    memory.clear()
    memory.update(records)
    return newest


def forget_oldest(written: Path, pattern: str) -> None:
    """Keep the newest files of a kind, so that a server's runs cannot fill the party's disk.

    The file just written is the newest, also after a clock that went back.
    """
    ages = {}
    for path in written.parent.glob(pattern):
        with suppress(FileNotFoundError):  # another process of the party may tidy as well
            ages[path] = path.stat().st_mtime_ns
    latest = max(ages.values(), default=0)
    if ages.pop(written, latest) < latest:
        os.utime(written, ns=(latest, latest + 1))
    for path in sorted(ages, key=ages.__getitem__)[: 1 - MAX_RUNS]:
        path.unlink(missing_ok=True)


def compare_at_home(
    model: Learner, party: Party, config: ConfigRecord, state: PartyState
) -> bool | None:
    """Log whether a model beats the party's own on its held-out rows; None if unknown.

    It does if its metric is better by more than one standard error of the difference. The
    party's own model learns from its records only, once per run. An error is logged and goes
    no further: what is answered must not depend on it.
    """
    x, y = party.x_test, party.y_test
    if not party.compare_at_home or x is None or y is None or not len(y):
        return None
    try:
        own = state.alone
        if own is None:
            rng = party.rng(read_seed(config), "alone")
            alone = party.learner_fn().fit(party.x, party.y, rng=rng)
            own = state.alone = evaluate_model(alone, x, y, party.task).shares
        return _is_better(party, evaluate_model(model, x, y, party.task).shares, own)
    except Exception:
        logger.exception("The model of the run could not be compared with one of its own.")
        return None


def _is_better(party: Party, received: FloatArray, own: FloatArray) -> bool:
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


def _answers_openly(state: PartyState) -> bool:
    """Tell whether the party has released something in this run, and all without noise."""
    released = [event for event, _ in state.ledger(DEFAULT_DELTA).entries]
    return bool(released) and all(isinstance(event, NonPrivateEvent) for event in released)


def party_loader(load_data: LoadData, **party: Any) -> Callable[[Context], Party]:
    """Return what `client_app` needs, made of a function that deals out rows.

    Parameters
    ----------
    load_data : callable
        Takes Flower's partition id and the number of partitions. Returns four arrays in the
        order of scikit-learn's `train_test_split`, x_train, x_test, y_train and y_test; or
        two sets, to train on and to test on: pairs (x, y), or data sets or loaders of torch.
        Rows without a label are dropped, and counted in the party's own log alone.
    **party
        All else that a `Party` takes, such as `public`, `num_classes` and `learner_fn`.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from sklearn.linear_model import LogisticRegression
    >>> from clients import SklearnLearner
    >>> def load_data(partition_id, num_partitions):
    ...     x = np.arange(8.0).reshape(8, 1)
    ...     return x[:6], x[6:], [0, 0, 0, 1, 1, 1], [1, 1]
    >>> load = party_loader(
    ...     load_data,
    ...     num_classes=2,
    ...     learner_fn=lambda: SklearnLearner(LogisticRegression(), num_classes=2),
    ... )
    >>> node = Context(1, 1, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})
    >>> load(node)
    Party(partition_id=3, learner_name='learner', task='single-label', num_classes=2, \
x=(6, 1) float64, y=(6,) int64, public=(0, 1) float64, x_test=(2, 1) float64, y_test=(2,) int64)
    """
    known = [*(field.name for field in fields(Party)), "classes"]
    for name in party:
        require_argument(PARTY_LOADER, name, known)

    def load_party(context: Context) -> Party:
        node = context.node_config
        for key in (keys.PARTITION_ID, keys.NUM_PARTITIONS):
            require(key in node, PARTY_LOADER, "node_config", f"with {key!r}", sorted(node))
        number, count = int(node[keys.PARTITION_ID]), int(node[keys.NUM_PARTITIONS])
        x, x_test, y, y_test = _four_arrays(load_data(number, count))
        classes = party.get("classes") or ()
        x, y = _labelled("y_train", x, y, classes)
        x_test, y_test = _labelled("y_test", x_test, y_test, classes)
        return Party(x=x, y=y, x_test=x_test, y_test=y_test, partition_id=number, **party)

    return load_party


def _four_arrays(loaded: Sequence[Any]) -> Sequence[Any]:
    """Return arrays in the order of `train_test_split`."""
    if len(loaded) == 4:
        y_comes_second = _depth(loaded[1]) < _depth(loaded[0])
        rule, got = "x_train, x_test, y_train and y_test in this order", "labels as the second"
        require_data(not y_comes_second, PARTY_LOADER, "what load_data returns", rule, got)
        return loaded
    if len(loaded) != 2:
        raise InvalidData(
            f"{PARTY_LOADER}: load_data must return x_train, x_test, y_train and y_test, or a "
            f"set to train on and one to test on, got {len(loaded)} values."
        )
    (x, y), (x_test, y_test) = map(_rows_and_labels, loaded)
    return x, x_test, y, y_test


def _rows_and_labels(given: Any) -> tuple[Any, Any]:
    """Return rows and labels of a pair, or of a data set or a loader of torch."""
    if isinstance(given, tuple | list):
        x, y = given
        return x, y
    # A loader shuffles and may drop rows; the set behind it has them all, in order.
    rows = getattr(given, "dataset", given)
    if hasattr(rows, "tensors"):
        x, y = rows.tensors
        return x, y
    items = [rows[i] for i in range(len(rows))]
    pairs = [tuple(item.values()) if isinstance(item, dict) else item for item in items]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _depth(given: Any) -> int:
    """Return the number of dimensions; records of a list may be of several shapes."""
    if not isinstance(given, list | tuple):
        return np.ndim(given)
    deeper = any(hasattr(one, "__len__") and not isinstance(one, str) for one in given)
    return 2 if deeper else 1


def _labelled(name: str, x: Any, y: Any, classes: Sequence[object]) -> tuple[Any, Any]:
    """Return the rows that have a label, and their labels; all as they are if all have one."""
    missing = is_missing(y, classes)
    if not missing.any() or len(x) != len(missing):
        return x, y
    logger.warning("%d rows without a label in %s are dropped.", missing.sum(), name)
    return _rows_at(x, ~missing), _rows_at(y, ~missing)


def _rows_at(x: Any, kept: Array) -> Any:
    """Return some rows of an array, a list, a tensor or a frame."""
    if isinstance(x, list | tuple):
        return [row for row, keep in zip(x, kept, strict=True) if keep]
    return x.loc[kept] if hasattr(x, "loc") else x[np.flatnonzero(kept)]
