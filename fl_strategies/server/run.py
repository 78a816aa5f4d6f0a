"""A run: its state, its folder that outlives the server process, and its reports.

`dump_state` turns the state that one round leaves to the next (nested containers, arrays,
ledgers and the data classes that the caller names) into the bytes of an ``.npz`` archive;
`load_state` rebuilds just these.

The folder of a `Checkpoint` holds that state as it was before the round that is running, every
reply of this round, each written before the strategy sees it, and what was drawn at random
in it. After a kill the round is replayed: what has arrived comes from the disk,
who has not answered is asked, and nothing random is drawn a second time. Every file carries
a checksum of its content, its place and its run, and one that is damaged is never used.

`Run` leaves nothing behind, a `Checkpoint` is a run with a folder.
"""

import csv
import hashlib
import io
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, Error, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fl_strategies import _compat
from fl_strategies._util import (
    SHARED,
    Array,
    locked,
    make_folder,
    replace_file,
    sealed,
    unsealed,
)
from fl_strategies.errors import (
    CheckpointUnavailable,
    InvalidData,
    KnowledgeMismatch,
    MissingExtra,
    require,
)
from fl_strategies.privacy.events import event_to_json
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.replies import (
    GridAround,
    Known,
    PartyReply,
    PartyReport,
    StreamingGrid,
    check_size,
    cut_short,
    stream_replies,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics

PRICE: Final[Sequence[str]] = (
    keys.EPSILON_PARTY,
    keys.DELTA_PARTY,
    keys.EPSILON_EXAMPLE,
    keys.DELTA_EXAMPLE,
    keys.NUM_RELEASES,
)
"""A party's report of the cost of all its releases."""


@dataclass(kw_only=True)
class State:
    """State of every strategy; one that leaves more to the next round adds fields.

    Parameters
    ----------
    ledger : PrivacyLedger
        What the run has released.
    round : int
        Rounds asked so far, over all calls of `start`.
    history : dict
        Metrics of the rounds, by phase and round.
    parties : dict of partition id to PartyReport
        What each party reported last.
    prices : dict of round to dict of partition id to metrics
        What each party's releases had cost by the end of a round, as it reports.
    members : dict
        Which node is which party.
    delivery : Knowledge, optional
        What parties are given after a round.
    ledgers : dict of partition id to (epsilon, ledger)
        What parties report that their training costs, where only they can know.
    """

    kinds: ClassVar[tuple[type, ...]] = (Knowledge, PartyReport)
    """Data classes that occur in the fields."""

    ledger: PrivacyLedger
    round: int = 0
    history: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: {"train": {}, "evaluate": {}}
    )
    parties: dict[int, PartyReport] = field(default_factory=dict)
    prices: dict[int, dict[int, Metrics]] = field(default_factory=dict)
    members: Known = field(default_factory=dict)
    delivery: Knowledge | None = None
    ledgers: dict[int, tuple[float, PrivacyLedger]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return all fields by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def note(self, replies: Iterable[PartyReply[None]], *, evaluated: bool) -> None:
        """Keep what parties report: after training also what their releases have cost."""
        for reply in replies:
            party, metrics = reply.partition_id, reply.metrics
            report = self.parties.setdefault(party, PartyReport(reply.learner_name, {}, {}))
            (report.evaluate if evaluated else report.train).update(metrics)
            if not evaluated:
                price = {key: metrics[key] for key in PRICE if key in metrics}
                self.prices.setdefault(self.round, {})[party] = price

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what `to_dict` once gave."""
        for name, value in values.items():
            setattr(self, name, value)


_TREE = "tree"
_CONTAINERS: Mapping[str, type] = {"list": list, "tuple": tuple, "set": set}


def dump_state(values: Mapping[str, object], kinds: Sequence[type] = ()) -> bytes:
    """Return the values as bytes; raise `InvalidData` for anything that is not plain.

    Examples
    --------
    >>> load_state(dump_state({"rounds": {1: (0.5, None)}, "rows": np.arange(3)}))
    {'rounds': {1: (0.5, None)}, 'rows': array([0, 1, 2])}
    """
    beside: dict[int, tuple[str, Array]] = {}
    tree = json.dumps(_written(dict(values), tuple(kinds), beside)).encode()
    arrays: dict[str, Any] = {_TREE: np.frombuffer(tree, np.uint8), **dict(beside.values())}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def load_state(data: bytes, kinds: Sequence[type] = ()) -> dict[str, Any]:
    """Undo `dump_state`; raise `InvalidData` for bytes that it has not written."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = dict(archive)
        tree = json.loads(arrays.pop(_TREE).tobytes())
        state: dict[str, Any] = _read(tree, {kind.__name__: kind for kind in kinds}, arrays)
    except InvalidData:
        raise
    except Exception as error:  # a damaged archive may fail in any way
        raise InvalidData(
            f"State: the file must be as it was written, got another ({type(error).__name__})."
        ) from error
    return state


def _written(
    value: object, kinds: tuple[type, ...], beside: dict[int, tuple[str, Array]]
) -> object:
    """Return a value as JSON has it; arrays are put beside it, each once, by their ids."""
    write = partial(_written, kinds=kinds, beside=beside)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name, _ = beside.setdefault(id(value), (f"array-{len(beside)}", value))
        return {"array": name}
    if isinstance(value, Mapping):
        return {"dict": [[write(key), write(item)] for key, item in value.items()]}
    if isinstance(value, PrivacyLedger):
        return {"ledger": value.state_dict()}
    if is_dataclass(value) and type(value) in kinds:
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return {type(value).__name__: write(own)}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [write(item) for item in value]}  # type: ignore[attr-defined]
    raise InvalidData(f"State: values must be plain, got {type(value).__name__}.")


def _read(tree: Any, kinds: Mapping[str, type], arrays: Mapping[str, Array]) -> Any:
    """Undo `_written`."""
    read = partial(_read, kinds=kinds, arrays=arrays)
    if not isinstance(tree, dict):
        return tree
    ((name, content),) = tree.items()
    if name == "array":
        return arrays[content]
    if name == "dict":
        return {read(key): read(value) for key, value in content}
    if name == "ledger":
        return PrivacyLedger.from_state_dict(content)
    if name in _CONTAINERS:
        return _CONTAINERS[name](read(item) for item in content)
    return kinds[name](**read(content))


logger = logging.getLogger("flwr.fl_strategies")

SCHEMA: Final = 2
_RUN_FILE: Final = "run.json"
_COMPLETE: Final = "complete.json"
_BAD_REPLY: Final = 2
_BEGIN_ANEW: Final = "Restore the folder from a copy, or begin anew in another one."
_ASK_AGAIN: Final = "Remove it, and the complete.json beside it, to ask this node again."
_ASK_OTHERS: Final = "Remove it to ask those again whose reply is missing."


EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]
Start: TypeAlias = Callable[..., Result]
"""Flower's loop over rounds, with everything given but grid, `num_rounds` and `evaluate_fn`."""


class Resumable(Protocol):
    """A strategy, as far as its run is concerned."""

    max_reply_bytes: int
    state: Any
    """Its `State`."""

    @property
    def name(self) -> str:
        """Name in logs."""

    @property
    def ledger_(self) -> PrivacyLedger:
        """What the run released."""

    def identity(self) -> Mapping[str, object]:
        """Return, as JSON has it, what must be the same for a run to be resumed."""


class Run:
    """A run that leaves nothing behind: everything is asked and drawn once."""

    name = ""
    """What parties keep their state by; empty for a run that cannot be resumed."""
    is_kept = False

    @property
    def num_attempts(self) -> int:
        """How often the parties were asked in this round: once, and again after a resume.

        What a party drew for the first question may have left it although it never arrived.
        Charging the round so many times is therefore never too little; a party that keeps a
        state folder has given the same answer twice and spent less.
        """
        return 1

    def attempts_of(self, node_id: int) -> int:  # noqa: ARG002 - see `Checkpoint`
        """Return how often one party was asked in this round; see `num_attempts`."""
        return 1

    def first_attempt_of(self, node_id: int) -> int:  # noqa: ARG002 - see `Checkpoint`
        """Return at which time of asking in this round a party was asked first."""
        return 1

    def draw_once(
        self,
        name: str,  # noqa: ARG002 - see `Checkpoint`
        draw: Callable[[], Mapping[str, object]],
    ) -> Mapping[str, Any]:
        """Return what `draw` gives; after a resume what it gave before.

        For noise: drawn a second time for the same data, it would protect less.
        """
        return draw()

    def begin_round(self) -> None:
        """Keep what the rounds so far have left."""

    def reopen(self, nodes: Iterable[int]) -> None:
        """Let a resume ask these nodes again."""

    def execute(
        self,
        strategy: Resumable,  # noqa: ARG002 - see `Checkpoint`
        start: Start,
        grid: Grid,
        num_rounds: int,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """Run some rounds."""
        careful = StreamingGrid(grid) if _compat.is_flowers_own(grid) else grid
        return start(careful, num_rounds=num_rounds, evaluate_fn=evaluate_fn)


class Checkpoint(Run):
    """A run on disk that a resume can bring back, for one server at a time.

    The folder holds parties' replies; it is made if it is missing, for its owner only. With
    `resume` the run in it goes on; if there is none, a new one begins in any case. `kinds` are
    the data classes that the state may contain. The name is the same after every resume.
    """

    is_kept = True

    def __init__(self, folder: Path, *, resume: bool, kinds: Sequence[type] = ()) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.resume = resume
        self.kinds = kinds
        self._strategy: Resumable | None = None
        self.round = 0
        self._resumed_round = 0
        self._asked: dict[Path, list[set[int]]] = {}

    def execute(
        self,
        strategy: Resumable,
        start: Start,
        grid: Grid,
        num_rounds: int,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """Run the rounds that are not over; `num_rounds` counts from the beginning."""
        owner, first = type(strategy).__name__, strategy.state.round == 0
        rule = "omitted to start a second time"
        require(first, owner, "checkpoint_dir", rule, strategy.state.round)
        self._strategy = strategy
        with self.opened(strategy.identity()) as kept:
            strategy.state.restore(kept or {})
            done = strategy.state.round
            rule = f"at least {done + 1}, the round that the checkpoint is in"
            require(num_rounds > done, owner, "num_rounds", rule, num_rounds)
            if kept is not None:
                logger.info(
                    "%s resumes in round %s of %s.", strategy.name, done + 1, num_rounds
                )
            recorded = RecordedGrid(grid, self, max_reply_bytes=strategy.max_reply_bytes)
            counted = evaluate_fn and _counted_from(done, evaluate_fn)
            result = start(recorded, num_rounds=num_rounds - done, evaluate_fn=counted)
        return _whole(result, done, strategy.state.history)

    @contextmanager
    def opened(self, settings: Mapping[str, object]) -> Iterator[dict[str, Any] | None]:
        """Lock the folder and give the state to resume from, or None for a new run.

        `settings` must be those that the run began with.
        """
        with ExitStack() as stack:
            with self._disk():
                make_folder(self.folder)
                stack.enter_context(locked(self.folder / ".lock", wait=False))
            yield self._open(settings)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise CheckpointUnavailable(
                f"Checkpoint: {self.folder} must serve one run at a time, got a second one."
            ) from error
        except OSError as error:
            raise CheckpointUnavailable(
                f"Checkpoint: {self.folder} must be on a disk that can be read and written, "
                f"got: {error.strerror or type(error).__name__}."
            ) from error

    def _open(self, settings: Mapping[str, object]) -> dict[str, Any] | None:
        for draft in self.folder.rglob("*.draft-*"):
            draft.unlink()  # of a server that was killed
        text = json.dumps(settings, sort_keys=True)
        path, digest = self.folder / _RUN_FILE, hashlib.sha256(text.encode()).hexdigest()
        rounds = sorted(self.folder.glob("state-*.npz"))
        if not path.exists() and not rounds:
            self.name = secrets.token_hex(16)
            fresh = {"schema": SCHEMA, "run-name": self.name, "settings": digest}
            self._write(path, json.dumps(fresh).encode())
            return None
        rule = "a new folder, or resume given to continue the run in it"
        require(self.resume, "Checkpoint", "checkpoint_dir", rule, str(self.folder))
        run = json.loads(self._read(path, _BEGIN_ANEW))
        if run["schema"] != SCHEMA:
            raise self._damaged(path, f"schema {run['schema']}", _BEGIN_ANEW)
        if run["settings"] != digest:
            raise InvalidData(
                f"Checkpoint: the settings must be those that the run in {self.folder} began "
                f"with, got others. Give them again, or use a new folder."
            )
        self.name = str(run["run-name"])
        if not rounds and any(self.folder.glob("round-*")):
            raise self._damaged(self._state_path(1), "none", _BEGIN_ANEW)
        if not rounds:
            return None
        self.round = self._resumed_round = int(rounds[-1].stem.removeprefix("state-"))
        return load_state(self._read(rounds[-1], _BEGIN_ANEW), self.kinds)

    def begin_round(self) -> None:
        """See `Run`."""
        if self._strategy is not None:
            state = self._strategy.state
            self.keep_state(state.round + 1, state.to_dict())

    def keep_state(self, number: int, state: Mapping[str, object]) -> None:
        """Keep the state before a round; what belongs to earlier rounds is removed."""
        if number == self.round:
            return
        self.round = number
        self._write(self._state_path(number), dump_state(state, self.kinds))
        with self._disk():
            for path in self.folder.glob("state-*.npz"):
                if path != self._state_path(number):
                    path.unlink()
            for path in self.folder.glob("round-*"):
                if path != self._round_folder():
                    shutil.rmtree(path)

    def draw_once(self, name: str, draw: Callable[[], Mapping[str, object]]) -> dict[str, Any]:
        """Return what `draw` gives, and the same when the round is replayed."""
        path = self._round_folder() / f"{name}.npz"
        if not path.exists():
            self._write(path, dump_state(draw(), self.kinds))
        # Never drawn again: two noises on the same data would protect less.
        return load_state(self._read(path, _BEGIN_ANEW), self.kinds)

    @property
    def resuming(self) -> bool:
        """Whether the present round had begun before the server was stopped."""
        return self.round > 0 and self.round == self._resumed_round

    @property
    def num_attempts(self) -> int:
        """See `Run`; the present time is included."""
        before = len(self._questions(MessageType.TRAIN))
        finished = (self._phase_folder(MessageType.TRAIN) / _COMPLETE).exists()
        return before if finished else before + 1

    def attempts_of(self, node: int) -> int:
        """Return how often one party was asked in this round."""
        return sum(node in asked for asked in self._questions(MessageType.TRAIN))

    def first_attempt_of(self, node: int) -> int:
        """Return at which time of asking in this round a party was asked first."""
        times = enumerate(self._questions(MessageType.TRAIN), start=1)
        return next((number for number, asked in times if node in asked), 1)

    def note_attempt(self, phase: str, nodes: Sequence[int]) -> None:
        """Note that parties are about to be asked."""
        before = self._questions(phase)
        path = self._phase_folder(phase) / f"{len(before) + 1}.asked"
        self._write(path, json.dumps(nodes).encode())
        before.append({*nodes})

    def _questions(self, phase: str) -> list[set[int]]:
        """Return who was asked each time; read once, as every reply may need it."""
        folder = self._phase_folder(phase)
        if folder not in self._asked:
            # An answer without a question means that a file is gone.
            count = max(len(list(folder.glob("*.asked"))), bool(self.recorded(phase)))
            paths = [folder / f"{number + 1}.asked" for number in range(count)]
            self._asked[folder] = [{*json.loads(self._read(p, _BEGIN_ANEW))} for p in paths]
        return self._asked[folder]

    def record(self, phase: str, node: int, reply: bytes) -> None:
        """Write an encoded reply, or in place of an older one from the same node."""
        self._write(self._phase_folder(phase) / f"{node}.message", reply)

    def recorded(self, phase: str) -> set[int]:
        """Return the nodes whose reply is on disk."""
        return {int(path.stem) for path in self._phase_folder(phase).glob("*.message")}

    def replay(self, phase: str, request: Message) -> Message:
        """Return the recorded reply as one to this request."""
        path = self._phase_folder(phase) / f"{request.metadata.dst_node_id}.message"
        reply = _compat.message_from_bytes(self._read(path, _ASK_AGAIN))
        if reply.has_error():
            return Message(reply.error, reply_to=request)
        return Message(reply.content, reply_to=request)

    def complete(self, phase: str, nodes: Iterable[int]) -> dict[str, list[int]]:
        """Note that a phase has ended; return who was connected and who answered."""
        noted = {"nodes": sorted(nodes), "answered": sorted(self.recorded(phase))}
        self._write(self._phase_folder(phase) / _COMPLETE, json.dumps(noted).encode())
        return noted

    def reopen(self, nodes: Iterable[int]) -> None:
        """Let a resume ask those again whose reply was missing or bad: too few were good."""
        folder = self._phase_folder(MessageType.TRAIN)
        for name in (_COMPLETE, *(f"{node}.message" for node in nodes)):
            (folder / name).unlink(missing_ok=True)

    def completed(self, phase: str) -> dict[str, list[int]] | None:
        """Return what `complete` noted of a phase, or None while it lasts."""
        path = self._phase_folder(phase) / _COMPLETE
        return dict(json.loads(self._read(path, _ASK_OTHERS))) if path.exists() else None

    def _write(self, path: Path, content: bytes) -> None:
        with self._disk():
            make_folder(path.parent)
            replace_file(path, sealed(self._place(path), content))

    def _read(self, path: Path, remedy: str) -> bytes:
        """Return what was written; raise `InvalidData`, with what to do, if it is damaged."""
        with self._disk():
            data = path.read_bytes() if path.exists() else None
        content = None if data is None else unsealed(self._place(path), data)
        if content is None:
            raise self._damaged(path, "none" if data is None else "another", remedy)
        return content

    def _damaged(self, path: Path, found: str, remedy: str) -> InvalidData:
        return InvalidData(
            f"Checkpoint: {path} must be as it was written by this version, got {found}. "
            f"{remedy}"
        )

    def _place(self, path: Path) -> str:
        """Return where content belongs; the name of the run is in the first file of all."""
        name = str(path.relative_to(self.folder))
        return name if name == _RUN_FILE else f"{self.name}/{name}"

    def _state_path(self, number: int) -> Path:
        return self.folder / f"state-{number:09}.npz"

    def _round_folder(self) -> Path:
        return self.folder / f"round-{self.round:09}"

    def _phase_folder(self, phase: str) -> Path:
        return self._round_folder() / phase


class RecordedGrid(GridAround):
    """A grid whose replies are on disk before they are used.

    The strategy reads them one by one from there, so that memory does not grow with the
    number of parties.

    An error takes the place of a reply of more than `max_reply_bytes`, which is not written.
    """

    def __init__(self, grid: Grid, checkpoint: Checkpoint, *, max_reply_bytes: int) -> None:
        super().__init__(grid)
        self._checkpoint = checkpoint
        self._max_reply_bytes = max_reply_bytes
        self._nodes: list[int] = []

    def get_node_ids(self) -> list[int]:
        """Return the connected nodes; in a resumed round also those that have answered."""
        resuming, phase = self._checkpoint.resuming, MessageType.TRAIN
        finished = self._checkpoint.completed(phase) if resuming else None
        recorded = self._checkpoint.recorded(phase) if resuming else set()
        self._nodes = (
            sorted(recorded.union(self._grid.get_node_ids()))
            if finished is None
            else finished["nodes"]
        )
        return self._nodes

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Ask who has not answered yet and give all replies, in the order of the messages."""
        requests = list(messages)
        if not requests:
            return []
        phase = requests[0].metadata.message_type
        finished = self._checkpoint.completed(phase)
        if finished is None:
            self._gather(phase, requests, timeout)
            finished = self._checkpoint.complete(phase, self._nodes)
        recorded = {*finished["answered"]}
        answered = [r for r in requests if r.metadata.dst_node_id in recorded]
        # Earlier questions first: see `check_claim`.
        answered.sort(key=lambda r: self._checkpoint.first_attempt_of(r.metadata.dst_node_id))
        for request in answered:
            if not request.metadata.message_id:
                _compat.assign_message_id(request)
        return (self._checkpoint.replay(phase, request) for request in answered)

    def _gather(self, phase: str, requests: Sequence[Message], timeout: float | None) -> None:
        recorded = self._checkpoint.recorded(phase)
        answered = {
            request.metadata.dst_node_id
            for request in requests
            if request.metadata.dst_node_id in recorded
            and not self._checkpoint.replay(phase, request).has_error()
        }
        asked = [r for r in requests if r.metadata.dst_node_id not in answered]
        if answered:
            logger.info("%s of %s replies are on disk.", len(answered), len(requests))
        if not asked:
            return
        self._checkpoint.note_attempt(phase, [r.metadata.dst_node_id for r in asked])
        for request, reply in stream_replies(self._grid, asked, timeout):
            self._checkpoint.record(
                phase, request.metadata.dst_node_id, self._encoded(request, reply)
            )

    def _encoded(self, request: Message, reply: Message) -> bytes:
        """Return a reply as bytes; an error in its place if it is too large, or cannot be."""
        try:
            if reply.has_error():
                error = Error(reply.error.code, cut_short(reply.error.reason or ""))
                return _compat.message_to_bytes(Message(error, reply_to=request))
            check_size(reply.content, self._max_reply_bytes)
            return _compat.message_to_bytes(Message(reply.content, reply_to=request))
        except KnowledgeMismatch as error:
            reason = str(error)
        except Exception as error:  # Flower reads more than it can write
            reason = f"Reply: it must be a message of Flower's, got {type(error).__name__}."
        return _compat.message_to_bytes(Message(Error(_BAD_REPLY, reason), reply_to=request))


def _whole(result: Result, done: int, history: Mapping[str, Mapping[int, Any]]) -> Result:
    """Add the rounds before a resume to a result, and count its rounds after them."""
    for phase in ("train", "evaluate"):
        metrics = getattr(result, f"{phase}_metrics_clientapp")
        late = {number + done: record for number, record in metrics.items()}
        early = {n: MetricRecord(m) for n, m in history[phase].items() if n <= done}
        metrics.clear()
        metrics.update({**early, **late})
    central = result.evaluate_metrics_serverapp
    result.evaluate_metrics_serverapp = {n + done: record for n, record in central.items()}
    return result


def _counted_from(done: int, evaluate: EvaluateFn) -> EvaluateFn:
    """Let rounds be counted from the beginning of a resumed run; round 0 is over."""

    def counted(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate(number + done, arrays) if number or not done else None

    return counted


OnRound: TypeAlias = Callable[[int, dict[str, float]], object]
"""Is called as `on_round(number, metrics)`; what it returns does not matter."""

SECONDS: Final = "seconds"


class Callbacks:
    """The user's functions, each called once a round that asked anybody.

    What one of them raises costs neither the run nor the others anything: it is logged the
    first time. Each gets a copy, so none can change what another sees.
    """

    def __init__(self, owner: str, on_round: OnRound | Sequence[OnRound] | None) -> None:
        given: Any = [] if on_round is None else on_round
        given = given if isinstance(given, Sequence) else [given]
        rule = "a function of round and metrics, or a list of such functions"
        require(all(map(callable, given)), owner, "on_round", rule, on_round)
        self._owner = owner
        self._functions: Sequence[OnRound] = tuple(given)
        self._failed: set[int] = set()
        self._began = 0.0
        self._last_round = 0

    def begin(self, rounds_before: int) -> None:
        """Start the clock of a round."""
        self._began = time.monotonic()
        self._last_round = rounds_before

    def end(self, number: int, num_rejected: int, **phases: Mapping[str, Any] | None) -> None:
        """Call every callback, unless no party was asked or they already ran for this round."""
        if number <= self._last_round:
            return
        self._last_round = number
        spent = {SECONDS: time.monotonic() - self._began, keys.NUM_REJECTED: num_rejected}
        metrics = {**spent, **dict(_named(phases))}
        for position, function in enumerate(self._functions):
            try:
                function(number, dict(metrics))
            except Exception as error:  # a user's own function may raise anything
                if position in self._failed:
                    continue
                self._failed.add(position)
                logger.warning(
                    "%s goes on although on_round function %s failed in round %s (%s: %s). "
                    "Later failures of it are not logged.",
                    self._owner,
                    getattr(function, "__qualname__", type(function).__qualname__),
                    number,
                    type(error).__name__,
                    error,
                )


def _named(phases: Mapping[str, Mapping[str, Any] | None]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of all phases, each by a name of its own; NaN is omitted."""
    for phase, metrics in phases.items():
        values = dict(metrics or {})
        parties = [int(number) for number in values.pop(keys.PARTITION_IDS, [])]
        for name, value in values.items():
            if not isinstance(value, list):
                named = {f"{phase}/{name}": value}
            else:
                places = parties if len(parties) == len(value) else range(len(value))
                named = {f"{phase}/{name}/{p}": v for p, v in zip(places, value, strict=True)}
            yield from ((key, one) for key, one in named.items() if not math.isnan(one))


ALL: Final = "all"
COLUMNS: Final = (
    "round",
    "party",
    "unit",
    "epsilon",
    f"epsilon{keys.UNBOUNDED}",
    "delta",
    keys.NUM_RELEASES,
    "mechanism",
)
_UNITS: Final = (
    ("example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
    ("party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
)


def write_epsilon_csv(strategy: Resumable, path: str | Path) -> None:
    """Write what each party's releases have cost by the end of each round.

    An epsilon is what the party itself reports, and counts everything that it has released by
    then. The lines of the party ``all`` have what the round's metrics say: the worst of all
    parties, or, where the server is trusted to add noise, what everybody else learns.

    Parameters
    ----------
    strategy : KnowledgeStrategy
        After a run, also one that failed.
    path : str or Path
        Of the file, which is replaced if it is there.

    Notes
    -----
    ``epsilon`` is empty and ``epsilon-unbounded`` true where nothing is promised, also
    because a party reports nothing. ``mechanism`` names the kinds of event in the run's ledger
    by which a finite epsilon holds; it is empty where that ledger promises nothing.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *_lines(strategy)])
    replace_file(Path(path), text.getvalue().encode(), SHARED)


def _lines(strategy: Resumable) -> Iterator[Sequence[object]]:
    combined, mechanism = strategy.state.history["train"], _mechanism(strategy)
    prices = strategy.state.prices
    for number in sorted({*prices, *combined}):
        lines: dict[object, Mapping[str, float]] = dict(sorted(prices.get(number, {}).items()))
        if number in combined:
            lines[ALL] = combined[number]
        for party, metrics in lines.items():
            priced = {name: metrics[name] for name in PRICE if name in metrics}
            known = {name: value for name, value in priced.items() if math.isfinite(value)}
            for unit, epsilon, delta in _UNITS:
                bounded = epsilon in known
                yield (
                    number,
                    party,
                    unit,
                    known.get(epsilon, ""),
                    "false" if bounded else "true",
                    known.get(delta, ""),
                    known.get(keys.NUM_RELEASES, ""),
                    mechanism if bounded else "",
                )


def _mechanism(strategy: Resumable) -> str:
    """Return the kinds of event that bound what a run costs; nothing if none does."""
    ledger = strategy.ledger_
    try:
        bounded = math.isfinite(ledger.get_epsilon())
    except MissingExtra:  # events of parties may need one
        return ""
    kinds = {str(event_to_json(event)["type"]) for event, _ in ledger.entries}
    return " ".join(sorted(kinds)) if bounded else ""
