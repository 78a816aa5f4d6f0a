"""The party's side of every strategy: its state, its charges, and training on its records.

Flower holds a party's state as records for the duration of a run; `clients.app` also
keeps them on disk. A `PartyState` declares the records and their types.

Whether a party answers at all is a release like any other. So where a party promises privacy,
training that fails, or a model with scores that are not finite, does not end in an error: a
model of public rows, or even scores, take its place, and the party's own log says so. The
replacement depends on nothing but the model's own training set, so it changes no bound on the
effect of one record.
"""

import functools
import json
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies._util import Array, FloatArray, IntArray, content_hash
from fl_strategies.aggregation.pool import Contrast
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    PublicDataMismatch,
)
from fl_strategies.learners import (
    Learner,
    LearnerFactory,
    PortableLearner,
    TrainingSet,
    evaluate_model,
    events_of,
    fit_ensemble,
    metric_names,
)
from fl_strategies.party.party import Party
from fl_strategies.privacy.accountant import Entry, claim
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.journal import Allowance
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.release import Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    Metrics,
    config_int,
    decode_arrays,
    encode_arrays,
    shown,
)

Plain = TypeVar("Plain", str, int)

_SPENT = "privacy-spent"


@dataclass(frozen=True)
class Field:
    """An attribute of a `PartyState`, kept in the record of this name.

    A record or value of a type other than declared counts as missing.
    """

    record: str


@dataclass(frozen=True)
class ScalarField(Field, Generic[Plain]):
    """A text or an integer, stored by name in a shared record."""

    name: str
    default: Plain

    def __get__(self, state: "PartyState", _: type) -> Plain:
        value = self._scalars(state).get(self.name)
        return value if isinstance(value, type(self.default)) else self.default

    def __set__(self, state: "PartyState", value: Plain) -> None:
        state.records[self.record] = ConfigRecord({**self._scalars(state), self.name: value})

    def _scalars(self, state: "PartyState") -> ConfigRecord:
        record = state.records.get(self.record)
        return record if isinstance(record, ConfigRecord) else ConfigRecord()


class ArraysField(Field):
    """Named arrays of numbers, read-only; None removes them."""

    def __get__(self, state: "PartyState", _: type) -> Mapping[str, Array] | None:
        record = state.records.get(self.record)
        return decode_arrays(record, sys.maxsize) if isinstance(record, ArrayRecord) else None

    def __set__(self, state: "PartyState", value: Mapping[str, Array] | None) -> None:
        if value is None:
            state.records.pop(self.record, None)
        else:
            state.records[self.record] = encode_arrays(value)


@dataclass(frozen=True)
class ArrayField(Field):
    """One array, stored by name in a record of its own, read-only; None removes it."""

    name: str

    def __get__(self, state: "PartyState", owner: type) -> Array | None:
        return (ArraysField(self.record).__get__(state, owner) or {}).get(self.name)

    def __set__(self, state: "PartyState", value: Array | None) -> None:
        ArraysField(self.record).__set__(state, None if value is None else {self.name: value})


@dataclass(frozen=True)
class KnowledgeField(Field):
    """Knowledge of one kind, such as a model with its learner's name; another is an error."""

    kind: str

    def __get__(self, state: "PartyState", _: type) -> Knowledge | None:
        arrays, meta = (state.records.get(name) for name in self._names)
        if not isinstance(arrays, ArrayRecord) or not isinstance(meta, ConfigRecord):
            return None
        content = RecordDict({keys.ARRAYS: arrays, keys.META: meta})
        return Knowledge.read(content, kind=self.kind, max_bytes=sys.maxsize)

    def __set__(self, state: "PartyState", value: Knowledge) -> None:
        content = RecordDict()
        value.write(content)
        written = zip(self._names, (content[keys.ARRAYS], content[keys.META]), strict=True)
        state.records.update(written)

    @property
    def _names(self) -> tuple[str, str]:
        return self.record, f"{self.record}-meta"


class PartyState:
    """State of every party; a strategy whose parties keep more adds fields in a subclass.

    Fields are written immediately: a charge stays if the rest of a message fails.

    Parameters
    ----------
    records : RecordDict, optional
        Flower's `Context.state`, or the records of another state; none if omitted.

    Examples
    --------
    >>> class MomentumState(PartyState):
    ...     momentum = ArraysField("mymethod-momentum")
    ...     steps = ScalarField("mymethod", "steps", 0)
    >>> state = PartyState()
    >>> MomentumState(state.records).steps += 2
    >>> MomentumState(state.records).steps, sorted(state.records)
    (2, ['mymethod'])
    """

    alone = ArrayField("alone", "alone")
    """Score of the party's own model on each held-out row."""
    answered_for = ScalarField("kept-run", "data", "")
    """Run and records that a state kept on disk belongs to."""
    num_answers = ScalarField("kept-run", "number", 0)
    """Number of answers that it covers."""

    def __init__(self, records: RecordDict | None = None) -> None:
        self.records = RecordDict() if records is None else records

    @property
    def has_released(self) -> bool:
        """Whether anything about the party's records has been released in this run."""
        return _SPENT in self.records

    def ledger(self, delta: float) -> PrivacyLedger:
        """Return the releases of this run about the party's records so far.

        A record that cannot be read is an error: it must not count as no release.
        """
        ledger, kept = PrivacyLedger("example", delta=delta), self.records.get(_SPENT)
        if kept is not None:
            ledger.load_state_dict(json.loads(str(kept["ledger"])))
        return ledger

    def charge(self, charges: Sequence[Entry], delta: float) -> PrivacyLedger:
        """Record a release, and return all releases of the run."""
        ledger = self.ledger(delta)
        ledger.charge_all(charges)
        self.records[_SPENT] = ConfigRecord({"ledger": ledger_to_text(ledger)})
        return ledger


def spend(
    party: Party, charges: Sequence[Entry], purpose: str, delta: float, state: PartyState
) -> PrivacyLedger:
    """Record what is about to leave a party, and return all that has been recorded.

    With a journal the party's whole past counts, and what would exceed its budget is
    refused here, before anything leaves. Without one, what the state of this run holds
    counts.
    """
    check_run(party, charges, state)
    if party.journal is not None:
        return party.journal.charge(charges, run=party.run, purpose=purpose)
    return state.charge(charges, delta)


def charge_plan(
    party: Party, plan: ReleasePlan, state: PartyState
) -> tuple[Price, PrivacyLedger, Metrics]:
    """Record what a plan's answer costs; return its price, the ledger and the metrics."""
    price = plan.price()
    ledger = spend(party, price.record, plan.purpose or plan.name, plan.record_delta, state)
    whole = price.whole_party
    known = ledger_of(whole, plan.record_delta) if whole else unprotected(plan.reason)
    return price, ledger, privacy_metrics(party=known, example=ledger)


def check_run(party: Party, charges: Sequence[Entry], state: PartyState) -> None:
    """Raise if a run would cost a record more than the party's policy allows."""
    policy, journal = party.policy, party.journal
    if policy.max_run_epsilon is None:
        return
    allowance = Allowance(
        max_epsilon=policy.max_run_epsilon, delta=policy.delta, sample_delta=policy.sample_delta
    )
    past: Sequence[Sequence[Entry]] = []
    if journal is not None:
        past = journal.releases_of(party.run)
    elif known := state.ledger(policy.delta).entries:
        past = [[entry] for entry in known]
    try:
        allowance.ledger("example", past, charges).charge_all(charges)
    except PrivacyBudgetExceeded as error:
        raise PrivacyBudgetExceeded(
            f"{party.owner}: a run must keep the policy's max-run-epsilon, got: {error}"
        ) from error


def is_promise(charges: Sequence[Entry]) -> bool:
    """Return whether there are releases, and all of them promise something to a record."""
    open_ = any(isinstance(event, NonPrivateEvent) or event.seeded for event, _ in charges)
    return bool(charges) and not open_


def ledger_to_text(ledger: PrivacyLedger) -> str:
    """Return a ledger as text, for the server; see `reported_ledgers`."""
    return json.dumps(ledger.state_dict())


def ledger_of(charges: Sequence[Entry], delta: float) -> PrivacyLedger:
    """Return a ledger that holds these charges and nothing else."""
    ledger = PrivacyLedger(charges[0][0].unit, delta=delta)
    ledger.compose_all(charges)
    return ledger


def unprotected(reason: str) -> PrivacyLedger:
    """Return the ledger of something that leaves without protection."""
    return ledger_of([(NonPrivateEvent(unit="party", reason=reason), 1)], DEFAULT_DELTA)


def privacy_metrics(*, party: PrivacyLedger, example: PrivacyLedger) -> Metrics:
    """Return the metrics of both units; every epsilon is reported with its delta."""
    return {
        keys.EPSILON_PARTY: party.get_epsilon(party.delta),
        keys.DELTA_PARTY: party.delta,
        keys.EPSILON_EXAMPLE: example.get_epsilon(example.delta),
        keys.DELTA_EXAMPLE: example.delta,
        keys.NUM_RELEASES: sum(count for _, count in example.entries),
    }


OPEN_METRICS: Final = open_charges("metrics on held-out rows left the party")
MAX_SEED = 2**63 - 1
MAX_ROUNDS = 2**31


class PartyRole(ABC):
    """What a party does when the server asks; stateless, so one instance serves all.

    Whatever must outlive a message belongs into `state`; a strategy whose parties keep more
    than all others do reads it by a `PartyState` of its own.
    """

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return what an answer to this message releases; the worst unless a role says so."""
        return ReleasePlan(name=str(config.get(keys.STRATEGY)), trainer=party.learner_fn)

    @abstractmethod
    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Learn from private data and return what may leave the party."""

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Take the final model and measure it on the party's held-out rows, if it has any."""
        model = receive_model(party, received)
        return model, self.measure(party, model, config, state)

    def measure(
        self,
        party: Party,
        model: Learner,
        config: ConfigRecord,
        state: PartyState,
        *,
        secret: bool = False,
    ) -> Metrics:
        """Return how good a model is on the held-out rows, or NaN if that stays at home.

        The first accuracy of a run in which nothing has left the party is recorded: what is
        promised later does not hold for all that has left.
        """
        unknown = dict.fromkeys(metric_names(party.task, party.num_classes), math.nan)
        x, y = party.x_test, party.y_test
        known = self.reports_metrics(party, config, state, secret=secret)
        if not known or x is None or y is None:
            return {keys.NUM_EXAMPLES: 0, **unknown}
        if not (party.public_test or state.has_released):
            spend(party, OPEN_METRICS, "evaluate", DEFAULT_DELTA, state)
        metrics = evaluate_model(model, x, y, party.task).metrics
        return {keys.NUM_EXAMPLES: len(y), **{k: metrics.get(k, math.nan) for k in unknown}}

    def reports_metrics(
        self, party: Party, config: ConfigRecord, state: PartyState, *, secret: bool = False
    ) -> bool:
        """Return whether metrics of a model on the held-out rows may leave the party.

        They are a release that no event accounts for. So none leave a party that keeps a
        journal, or whose policy lets nothing leave unprotected, or where anything is
        promised. On public test rows they say no more than the model does, which makes them
        free unless it is `secret`: it stays at home, and only noisy answers of it leave.
        """
        if party.y_test is None or not len(party.y_test):
            return False
        if party.journal is not None or not party.policy.allow_unprotected:
            return False
        free = party.public_test and not secret
        return free or not self.promises(party, config, state)

    def promises(self, party: Party, config: ConfigRecord, state: PartyState) -> bool:
        """Return whether a run promises privacy to a record or to the party.

        By the server's message, or by what the party has released in this run, which no
        server can change; before there is anything, by how its learner trains.
        """
        asked = self.plan(party, config)
        released = state.ledger(DEFAULT_DELTA).entries
        learned = is_promise(released) if state.has_released else asked.trains_privately
        return asked.promises or learned


def facts_of(party: Party, *, num_parties: int = 0) -> ReleaseFacts:
    """Return the public facts about a party, for its plans."""
    return ReleaseFacts(
        num_classes=party.num_classes,
        num_public=len(party.public),
        task=party.task,
        num_parties=num_parties,
        num_records=len(party.y),
        trainer=party.learner_fn,
    )


def read_seed(config: ConfigRecord) -> int:
    """Return the experiment's seed, named by the server."""
    return config_int(config, keys.SEED, minimum=0, maximum=MAX_SEED)


def read_round(config: ConfigRecord) -> int:
    """Return the number of the round, named by the server."""
    return config_int(config, keys.SERVER_ROUND, minimum=1, maximum=MAX_ROUNDS)


def require_public_rows(party: Party, config: ConfigRecord) -> None:
    """Raise if the strategy works on public rows and the party holds none."""
    if keys.PUBLIC_HASH in config and not len(party.public):
        raise PublicDataMismatch(
            f"{party.owner}: public must be given for {shown(config.get(keys.STRATEGY))}, "
            f"which works on public rows, got none."
        )


def check_encoding(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party make rows of raw records in the same way, if they do."""
    asked, held = config.get(keys.ENCODING, ""), party.encoding
    if asked != held:
        raise KnowledgeMismatch(
            f"{party.owner}: encoding must be the server's ({_encoding_shown(asked)}), got "
            f"{_encoding_shown(held)}. Give server and parties the same schema, or the same "
            "encoder, in the same version, or none to all."
        )


def _encoding_shown(value: object) -> str:
    if not isinstance(value, str):
        return shown(value)
    return f"hash {value[:12]!r}" if value else "none"


def check_num_classes(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party have a class list of the same length."""
    asked, held = config.get(keys.NUM_CLASSES), party.num_classes
    if type(asked) is not int or asked != held:
        raise KnowledgeMismatch(
            f"Server: {keys.NUM_CLASSES} must be {held}, as this party has classes, labels or "
            f"targets, got {shown(asked)}. Give server and parties the same class list."
        )


def check_public_data(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party hold the same public rows and class list."""
    check_num_classes(party, config)
    asked, held = config.get(keys.PUBLIC_HASH), content_hash(party.public)
    if asked != held:
        raise PublicDataMismatch(
            f"{party.owner}: public data must be the server's "
            f"(sha256 {str(asked)[:12]}), got {party.public.shape} {party.public.dtype} "
            f"(sha256 {held[:12]}). Use the same file, order and preprocessing everywhere."
        )


def receive_model(party: Party, received: Knowledge) -> Learner:
    """Rebuild a model that travelled as arrays, with code that the party chose itself."""
    name = str(received.meta.get(keys.LEARNER))
    return receiver_of(party, name).from_arrays(received.arrays)


def require_readable(party: Party, config: ConfigRecord) -> None:
    """Raise unless the party can read the model that it is to be sent, before it pays."""
    if keys.FINAL_LEARNER in config:
        receiver_of(party, str(config[keys.FINAL_LEARNER]))


def receiver_of(party: Party, name: str) -> PortableLearner:
    """Return the party's own learner of a name that accompanies a model."""
    factories = {party.learner_name: party.learner_fn, **party.catalogue}
    if name not in factories:
        raise KnowledgeMismatch(
            f"{party.owner}: the model's learner must be one of "
            f"{', '.join(sorted(factories))}, got {shown(name)}. Add it to the party's "
            f"catalogue, which is receives in a node-config."
        )
    twin = factories[name]()
    if not isinstance(twin, PortableLearner):
        raise KnowledgeMismatch(
            f"{party.owner}: the learner {name!r} must have from_arrays to "
            f"receive a model, got {type(twin).__name__}."
        )
    if twin.num_classes != party.num_classes:
        raise KnowledgeMismatch(
            f"{party.owner}: the learner {name!r} must have {party.num_classes} classes or "
            f"outputs to receive a model, got {twin.num_classes}."
        )
    return twin


logger = logging.getLogger("flwr.fl_strategies")

T = TypeVar("T")
Plan = Sequence[Entry]

_PUBLIC_ROWS: Final = 32
"""Number of public rows that a stand-in for a failed model is trained on."""


def teacher_charges(plans: Sequence[Plan], num_splits: int) -> Sequence[Entry]:
    """Return what privately trained teachers cost an example, or nothing if some are not.

    An example is in one teacher of each split: the most expensive teacher of a split
    counts, and splits add up.
    """
    if not all(plans):
        return ()
    size = len(plans) // num_splits
    splits = [plans[start : start + size] for start in range(0, len(plans), size)]
    largest = [max(split, key=lambda p: claim(p, DEFAULT_DELTA).epsilon) for split in splits]
    return [entry for plan in largest for entry in plan]


def trained(train: Callable[[], T], stand_in: Callable[[], T], *, promised: bool) -> T:
    """Return what training gives; where privacy is promised and it fails, the stand-in.

    Raises
    ------
    InvalidData
        In place of `KnowledgeMismatch`, which is about requests and so is reported to servers.
    """
    try:
        return train()
    except Exception as error:
        if promised:
            logger.exception("Training failed; a model of public rows answers in its place.")
            return stand_in()
        if isinstance(error, KnowledgeMismatch):
            raise InvalidData(str(error)) from error
        raise


def public_model(party: Party, learner_fn: LearnerFactory) -> Learner:
    """Return a model that has seen public rows only, all of the first class or of zeros."""
    x = party.rows_to_try(_PUBLIC_ROWS)
    shape = (len(x),) if party.task == "single-label" else (len(x), party.num_classes)
    dtype = np.float64 if party.task == "regression" else np.int64
    return learner_fn().fit(x, np.zeros(shape, dtype=dtype), rng=np.random.default_rng(0))


def fit_on_records(
    party: Party,
    learner_fn: LearnerFactory,
    sets: Sequence[TrainingSet],
    rngs: Callable[[], Sequence[np.random.Generator]],
    *,
    promised: bool,
) -> list[Learner]:
    """Fit one model per training set, all at once where the learner knows how.

    Where privacy is promised, a set that cannot be learned costs its own model only.
    """

    def fit_each() -> list[Learner]:
        stand_in = functools.partial(public_model, party, learner_fn)
        fits = [
            functools.partial(learner_fn().fit, *one, rng=rng)
            for one, rng in zip(sets, rngs(), strict=True)
        ]
        return [trained(fit, stand_in, promised=True) for fit in fits]

    return trained(
        lambda: fit_ensemble(learner_fn, sets, rngs=rngs(), kind="teachers"),
        fit_each,
        promised=promised,
    )


def finite_logits(owner: str, model: Learner, x: Array, *, promised: bool) -> FloatArray:
    """Return a model's logits of rows; where it has none that are finite, even ones.

    Raises
    ------
    InvalidData
        In place of even logits, unless privacy is promised.
    """

    def ask() -> FloatArray:
        logits = np.asarray(model.logits(x), dtype=np.float64)
        sound = np.isfinite(logits).all(axis=1, keepdims=True)
        if not (promised or sound.all()):
            raise InvalidData(f"{owner}: logits must be finite, got NaN or infinity.")
        return np.where(sound, logits, 0.0)

    return trained(ask, lambda: np.zeros((len(x), model.num_classes)), promised=promised)


def labels_of(model: Learner, x: Array, *, promised: bool) -> IntArray:
    """Return the classes that a model names; the first one where it cannot be asked."""
    return trained(
        lambda: np.asarray(model.predict(x), dtype=np.int64),
        lambda: np.zeros(len(x), dtype=np.int64),
        promised=promised,
    )


def require_plan(model: Learner, plan: Plan) -> None:
    """Raise unless training has spent what was charged before it; nothing leaves then."""
    if tuple(events_of(model)) != tuple(plan):
        raise InvalidParameter(
            f"Learner: planned_events must be what training then spends, got other events of "
            f"{type(model).__name__}."
        )


def require_finite(model: PortableLearner) -> None:
    """Raise `InvalidData` for a model with parameters that are not finite."""
    for array in model.to_arrays().values():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidData("Learner: parameters must be finite, got NaN or infinity.")


# A classifier of own records against public rows estimates p(x) / p_public(x), the density of
# the party's records over that of the public rows. With it the party's evidence for a class is
# relative not only to its other classes but to the public rows, which all parties share: a row
# that is like none of its records gets little evidence for any of its classes. Public rows are
# scored by a classifier that has not seen them.

LEAST_COVERAGE: Final = 0.5
"""Below it the public rows are taken to be unlike the party's records; see `coverage`."""
MAX_RECORDS: Final = 1000
"""More records than these make a slower contrast and hardly a better one."""
_ROWS_PER_RECORD: Final = 2
_FEWEST_ROWS: Final = 100
_NUM_FOLDS: Final = 2
# Flexible models exaggerate on rows they have not seen. How it was chosen:
# docs/results/consensus.md.
_TRUST: Final = 0.7
_LARGEST: Final = 5.0


def contrasted(
    party: Party, views: Sequence[Array], seed: int
) -> tuple[FloatArray | None, Contrast]:
    """Return what to add to a party's evidence, and how its records relate to public rows.

    Nothing is added where public rows are unlike the records, or too few.
    """
    if len(party.public) < 2 * _NUM_FOLDS:
        return None, "none"
    ratio = log_ratio_to_public(party, views, seed)
    if coverage(ratio, party.num_classes) < LEAST_COVERAGE:
        return None, "uncovered"
    return _TRUST * ratio, "public"


def log_ratio_to_public(party: Party, views: Sequence[Array], seed: int) -> FloatArray:
    """Return log p(x) / p_public(x) for every row of every view, (num_views * num_public,).

    Views are the public rows, perhaps changed by augmentation: row i of each is public row i.
    Ratios are cut at plus and minus 5.
    """
    own = party.rng(seed, "contrast", 0).permutation(len(party.y))[:MAX_RECORDS]
    order = party.rng(seed, "contrast", 1).permutation(len(party.public))
    folds = [order[number::_NUM_FOLDS] for number in range(_NUM_FOLDS)]
    sets: list[TrainingSet] = []
    offsets = []  # log-odds that each training set starts from
    for number, fold in enumerate(folds):
        others = np.setdiff1d(np.arange(len(party.public)), fold)
        shuffled = party.rng(seed, "contrast", 3, number).permutation(len(others))
        background = others[shuffled[: max(_ROWS_PER_RECORD * len(own), _FEWEST_ROWS)]]
        x = np.concatenate([party.x[own], party.public[background]])
        y = np.repeat(np.array([1, 0], dtype=np.int64), [len(own), len(background)])
        sets.append((x, y))
        offsets.append(float(np.log(len(own) / len(background))))
    rngs = [party.rng(seed, "contrast", 2, number) for number in range(_NUM_FOLDS)]
    models = fit_ensemble(party.learner_fn, sets, rngs=rngs)
    ratio = np.empty((len(views), len(party.public)))
    for model, fold, offset in zip(models, folds, offsets, strict=True):
        for number, view in enumerate(views):
            logits = model.logits(view[fold])
            ratio[number, fold] = logits[:, 1] - logits[:, 0] - offset
    return np.clip(ratio, -_LARGEST, _LARGEST).reshape(-1)


def coverage(log_ratio: FloatArray, num_classes: int) -> float:
    """Return the share of a party's records that lie where public rows are, about.

    The mean over public rows of p(x) / p_public(x) is 1 if public rows are found wherever
    the party's records are, whatever the classes of both; and near 0 if they are not. A
    party of one class of C, as frequent as the others, has a ratio of C at most, so larger
    ones are cut: they would let a few odd rows speak for all.
    """
    return float(np.exp(np.minimum(log_ratio, np.log(2 * num_classes))).mean())
