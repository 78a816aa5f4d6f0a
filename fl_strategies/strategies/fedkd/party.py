"""The party's half of FedKD; see `fl_strategies.strategies.fedkd`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies.aggregation.class_weights import CLASS_COUNTS, both_counts, class_counts
from fl_strategies.aggregation.evidence import class_evidence, label_evidence, valid_counts
from fl_strategies.aggregation.evidence_pool import Contrast
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.accounting import (
    is_promise,
    privacy_metrics,
    spend,
    unprotected,
)
from fl_strategies.core.contrast import contrasted
from fl_strategies.core.party import Party
from fl_strategies.core.policy import Request, asked_number
from fl_strategies.core.protocols import Learner, plan_of
from fl_strategies.core.role import PartyHalf, check_public_data, read_seed
from fl_strategies.core.training import (
    finite_logits,
    public_model,
    require_plan,
    trained,
)
from fl_strategies.exceptions import require_known
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import LaplaceCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.strategies.fedkd import words
from fl_strategies.strategies.fedkd.augmentation import augmented, check_augmentation
from fl_strategies.wire.config import config_choice, config_float, config_int
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    decode_array,
    encode_arrays,
)
from fl_strategies.wire.quantization import MAX_LEVELS, ROUNDINGS, Rounding, score_format


class FedKDParty(PartyHalf):
    """The party's half: a model of its own, and its logits on the public rows."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that answers leave, about public rows as often as they are predicted."""
        times = asked_number(config, words.NUM_PREDICTIONS)
        return Request(
            name="fedkd",
            trainer=party.learner_fn,
            models=False,
            seeded=config.get(words.SEEDED_NOISE) is True,
            predictions=times * len(party.public),
        )

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - nothing comes before the end
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[Knowledge, Metrics]:
        """Return the largest logit, or all logits at the levels asked for."""
        check_public_data(party, config)
        config_choice(config, words.TASK, [party.task])
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        work = _Work.read(party, config, state)
        _require_public_labels(party, config)
        metrics = _spend(party, work, state)
        if work.weights in words.EVIDENCE:
            return self._evidence(party, config, work), metrics
        logits = self._logits(party, config, work, state)
        if work.request == "scale":
            state[words.LOGITS] = encode_arrays({words.LOGITS: logits})
            largest = float(np.abs(logits).max())
            return Knowledge("scale", {"scale": np.array([largest])}), metrics
        scores, counts = _to_wire(party, logits, config), _counts(party, config, work)
        return Knowledge("scores", {"scores": scores, **counts}), metrics

    def _evidence(self, party: Party, config: ConfigRecord, work: "_Work") -> Knowledge:
        """Return the model's logits without the class shares of its records."""
        arrays, logits = _counts(party, config, work), self._fitted_logits(party, config, work)
        counts = np.asarray(arrays[CLASS_COUNTS], dtype=np.float64)
        contrast: Contrast = "none"
        if party.task == "multi-label":
            evidence = label_evidence(logits, counts[0], counts[1])
        else:
            # What is trained privately must not be followed by what is not.
            wanted = config.get(words.CONTRAST) is True and not work.training
            views, seed = _views(party, config), read_seed(config)
            ratio, contrast = contrasted(party, views, seed) if wanted else (None, contrast)
            evidence = class_evidence(logits, counts, ratio)
        scores = _to_wire(party, evidence, config)
        return Knowledge("scores", {"scores": scores, **arrays}, {words.CONTRAST: contrast})

    def _logits(
        self, party: Party, config: ConfigRecord, work: "_Work", state: RecordDict
    ) -> FloatArray:
        """Return centred logits on all public rows, those of an earlier request if kept."""
        state.pop(words.LOGITS, None)  # another request starts anew
        if work.kept is not None:
            return work.kept
        logits = self._fitted_logits(party, config, work)
        if party.task == "single-label":
            logits = logits - logits.mean(axis=1, keepdims=True)
        return logits

    def _fitted_logits(self, party: Party, config: ConfigRecord, work: "_Work") -> FloatArray:
        """Train the party's model and ask it about every view of the public rows."""
        rng = party.rng(read_seed(config), "model")
        promised = is_promise(work.charges)

        def fit() -> Learner:
            model = party.learner_fn().fit(*_rows(party, config), rng=rng)
            require_plan(model, work.training)
            return model

        model = trained(fit, lambda: public_model(party, party.learner_fn), promised=promised)
        views = _views(party, config)
        answers = [finite_logits(party.owner, model, view, promised=promised) for view in views]
        return np.concatenate(answers)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """What a party is asked for and what that will cost, known without its records."""

    request: str
    weights: words.Weights
    kept: FloatArray | None
    training: Sequence[Entry]
    charges: Sequence[Entry]

    @classmethod
    def read(cls, party: Party, config: ConfigRecord, state: RecordDict) -> "_Work":
        """Read the server's request, and what an earlier one has left."""
        weights: words.Weights = config_choice(config, words.WEIGHTING, words.WEIGHTS)  # type: ignore[assignment]
        request = config_choice(config, words.REQUEST, words.REQUESTS)
        if weights in words.EVIDENCE:
            request = "scores"
        num_rows = _num_views(party, config) * len(party.public)
        kept = _kept_logits(state, num_rows) if weights not in words.EVIDENCE else None
        training = plan_of(party.learner_fn(), _num_rows(party, config)) if kept is None else ()
        if request == "scale":
            charges = [_open(words.PRIVATE_SCALE)]
        else:
            counting = _count_charges(party, config, weights)
            charges = [*counting, *(training or [_open(words.UNPROTECTED)])]
        return cls(
            request=request, weights=weights, kept=kept, training=training, charges=charges
        )


def _spend(party: Party, work: _Work, state: RecordDict) -> Metrics:
    """Record what is about to leave, before a record is looked at; return the figures."""
    scale = work.request == "scale"
    ledger = spend(
        party, work.charges, "fedkd scale" if scale else "fedkd", DEFAULT_DELTA, state
    )
    reason = words.PRIVATE_SCALE if scale else words.UNPROTECTED
    return privacy_metrics(party=unprotected(reason), example=ledger)


def _open(reason: str) -> Entry:
    return NonPrivateEvent(unit="example", reason=reason), 1


def _kept_logits(state: RecordDict, num_rows: int) -> FloatArray | None:
    """Return the logits that an earlier request was answered from, if they fit this one."""
    kept = state.get(words.LOGITS)
    if not isinstance(kept, ArrayRecord):
        return None
    logits: FloatArray = decode_array(words.LOGITS, kept[words.LOGITS])
    return logits if len(logits) == num_rows else None


def _count_noise(party: Party, config: ConfigRecord, weights: words.Weights) -> LaplaceCounts:
    epsilon = config_float(config, words.COUNT_EPSILON, minimum=1e-6, maximum=100)
    return words.count_mechanism(party.task, party.num_classes, epsilon, weights)


def _count_charges(
    party: Party, config: ConfigRecord, weights: words.Weights
) -> Sequence[Entry]:
    """Return what the class counts cost that are sent, if any are."""
    if weights == "uniform":
        return ()
    if weights not in words.NOISY:
        return [_open(words.EXACT_COUNTS)]
    seeded = config.get(words.SEEDED_NOISE) is True
    return _count_noise(party, config, weights).charges(seeded=seeded)


def _counts(party: Party, config: ConfigRecord, work: _Work) -> dict[str, Array]:
    """Return the class counts to be sent, if any; they have been charged before."""
    if work.weights == "uniform":
        return {}
    count = both_counts if work.weights in words.EVIDENCE else class_counts
    counts = count(_rows(party, config)[1], party.num_classes, party.task)
    if work.weights not in words.NOISY:
        return {CLASS_COUNTS: counts.astype(np.float64)}
    noise = _count_noise(party, config, work.weights)
    seeded = config.get(words.SEEDED_NOISE) is True
    rng = party.rng(read_seed(config), "counts") if seeded else None
    return {CLASS_COUNTS: valid_counts(noise.release(counts, rng).values, noise.scale)}


def _num_views(party: Party, config: ConfigRecord) -> int:
    """Return how often the public rows are to be predicted."""
    most = max(1, MAX_REPLY_BYTES // (4 * party.public.shape[0] * party.num_classes))
    times = config_int(config, words.NUM_PREDICTIONS, minimum=1, maximum=most)
    check_augmentation(party.owner, str(config.get(words.AUGMENTATION)), party.public, times)
    return times


def _views(party: Party, config: ConfigRecord) -> list[Array]:
    """Return the public rows as often as they are to be predicted."""
    name, seed = str(config.get(words.AUGMENTATION)), read_seed(config)
    times = range(_num_views(party, config))
    return [augmented(party.public, name, seed, number) for number in times]


def _to_wire(party: Party, scores: FloatArray, config: ConfigRecord) -> Array:
    """Return scores at the levels that were asked for."""
    bound = config_float(config, words.BOUND, minimum=1e-12, maximum=words.MAX_BOUND)
    levels = config_int(config, words.NUM_LEVELS, minimum=0, maximum=MAX_LEVELS)
    rounding: Rounding = config_choice(config, words.ROUNDING, ROUNDINGS)  # type: ignore[assignment]
    form = score_format(levels, bound, rounding)
    return form.to_wire(scores, party.rng(read_seed(config), "rounding"))


def _require_public_labels(party: Party, config: ConfigRecord) -> None:
    lacks = config.get(words.PUBLIC_LABELS) is True and party.public_y is None
    require_known(not lacks, party.owner, "public_y", "given to train on public labels", "none")


def _num_rows(party: Party, config: ConfigRecord) -> int:
    """Return how many rows the party's model learns from."""
    return len(party.y) + (config.get(words.PUBLIC_LABELS) is True) * len(party.public)


def _rows(party: Party, config: ConfigRecord) -> tuple[Array, Array]:
    if config.get(words.PUBLIC_LABELS) is not True:
        return party.x, party.y
    y = np.concatenate([party.y, np.asarray(party.public_y)])
    return np.concatenate([party.x, party.public]), y
