"""A party's copy of a run on its own disk, so that a restart does not start over.

Flower holds a node's state in memory and per run. A party with a journal also keeps it in
``runs/`` beside the journal, under the name that the run has for its server, together with
its last answers: who is asked the same thing again, because an answer was lost on its way,
gives the same answer, and nothing more is spent.

What is kept belongs to the very records it was learned from. A sample that was paid for one
set of records pays for no other, so if the data have changed, the party begins anew.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fl_strategies import Party, _compat
from fl_strategies._util import make_folder, replace_file
from fl_strategies.party.role import PartyState
from fl_strategies.wire import keys

logger = logging.getLogger("flwr.fl_strategies")

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
        """What the party's role kept when it last answered, or None."""
        return self._below(_STATE) if self._records is not None else None

    def answer(self, kind: str, question: str) -> RecordDict | None:
        """Return the last answer of this kind, if it was to the same question."""
        if self._records is None:
            return None
        asked = self._records.get(f"{_QUESTION}/{kind}")
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
    number = _restore(context.state, run.state, data)
    answer = respond()
    state = PartyState(context.state)
    state.answered_for, state.num_answers = data, number + 1
    run.keep(kind, question, answer, context.state)
    return answer


def _restore(memory: RecordDict, disk: RecordDict | None, data: str) -> int:
    """Put the newest state of this run and data into memory; return how many answers it had.

    Memory is newer if the disk was full. At the same number the disk is right: memory may
    hold what a question left behind that was refused.
    """
    found = {_number(state, data): state for state in (memory, disk or RecordDict())}
    newest = max(found)
    records = dict(found[newest].items()) if newest else {}
    memory.clear()
    memory.update(records)
    return newest


def _number(records: RecordDict, data: str) -> int:
    """Return how many answers a state is of; 0 for one of another run, or of other data."""
    state = PartyState(records)
    return state.num_answers if state.answered_for == data else 0


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
