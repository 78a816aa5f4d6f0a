"""The party's half of FedKD; see `fl_strategies.fedkd`."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies.augmentation import augmented, check_augmentation
from fl_strategies.class_weights import CLASS_COUNTS, both_counts, class_counts
from fl_strategies.contrast import contrasted
from fl_strategies.evidence import class_evidence, label_evidence, valid_counts
from fl_strategies.evidence_pool import Contrast
from fl_strategies.exceptions import InvalidData
from fl_strategies.fedkd import words
from fl_strategies.half import PartyHalf, check_public_data, read_seed
from fl_strategies.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    config_choice,
    config_float,
    config_int,
    decode_array,
    encode_arrays,
)
from fl_strategies.party import Party
from fl_strategies.policy import Request, asked_number
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.reporting import (
    DEFAULT_DELTA,
    privacy_metrics,
    spend,
    training_charges,
    unprotected,
)
from fl_strategies.protocols import Array, FloatArray, Learner, events_of
from fl_strategies.quantization import MAX_LEVELS, ROUNDINGS, Rounding, score_format


class FedKDParty(PartyHalf):
    """The party's half: a model of its own, and its logits on the public rows."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that answers leave, about public rows as often as they are predicted."""
        times = asked_number(config, words.NUM_PREDICTIONS)
        return Request(
            name="fedkd", trainer=party.learner_fn, models=False,
            seeded=config.get(words.SEEDED_NOISE) is True,
            predictions=times * len(party.public),
        )  # fmt: skip

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
        if not len(party.y):
            raise InvalidData(f"{party.owner}: x must hold records, got none.")
        weights: words.Weights = config_choice(config, words.WEIGHTING, words.WEIGHTS)  # type: ignore[assignment]
        if weights in words.EVIDENCE:
            return self._send_evidence(party, config, weights, state)
        logits, model = self._logits(party, config, state)
        if config_choice(config, words.REQUEST, words.REQUESTS) == "scale":
            return self._scale(party, logits, state)
        scores = _to_wire(party, logits, config)
        counts, charges = self._counts(party, config, weights)
        metrics = self._spend(party, charges, model, state)
        return Knowledge("scores", {"scores": scores, **counts}), metrics

    def _send_evidence(
        self, party: Party, config: ConfigRecord, weights: words.Weights, state: RecordDict
    ) -> tuple[Knowledge, Metrics]:
        """Return the model's logits without the class shares of its records."""
        views, seed, (x, y) = _views(party, config), read_seed(config), _rows(party, config)
        model = party.learner_fn().fit(x, y, rng=party.rng(seed, "model"))
        arrays, charges = self._counts(party, config, weights)
        logits = np.concatenate([model.logits(view) for view in views])
        counts = np.asarray(arrays[CLASS_COUNTS], dtype=np.float64)
        contrast: Contrast = "none"
        if party.task == "multi-label":
            evidence = label_evidence(logits, counts[0], counts[1])
        else:
            # What is trained privately must not be followed by what is not.
            wanted = config.get(words.CONTRAST) is True and not events_of(model)
            ratio, contrast = contrasted(party, views, seed) if wanted else (None, contrast)
            evidence = class_evidence(logits, counts, ratio)
        scores = _to_wire(party, evidence, config)
        metrics = self._spend(party, charges, model, state)
        meta = {words.CONTRAST: contrast}
        return Knowledge("scores", {"scores": scores, **arrays}, meta), metrics

    def _spend(
        self, party: Party, charges: list[Entry], model: Learner | None, state: RecordDict
    ) -> Metrics:
        """Record what is about to leave; return the figures of it."""
        trained = training_charges([model], 1) if model is not None else ()
        charges += trained or [(NonPrivateEvent(unit="example", reason=words.UNPROTECTED), 1)]
        ledger = spend(party, charges, "fedkd", DEFAULT_DELTA, state)
        return privacy_metrics(party=unprotected(words.UNPROTECTED), example=ledger)

    def _logits(
        self, party: Party, config: ConfigRecord, state: RecordDict
    ) -> tuple[FloatArray, Learner | None]:
        """Return logits on all public rows, and the model unless an earlier round had it."""
        kept = state.pop(words.LOGITS, None)  # another request starts anew
        views = _views(party, config)
        if isinstance(kept, ArrayRecord):
            logits = decode_array(words.LOGITS, kept[words.LOGITS])
            if len(logits) == len(views) * len(party.public):
                return logits, None
        x, y = _rows(party, config)
        model = party.learner_fn().fit(x, y, rng=party.rng(read_seed(config), "model"))
        logits = np.concatenate([model.logits(view) for view in views])
        if party.task == "single-label":
            logits = logits - logits.mean(axis=1, keepdims=True)
        return logits, model

    def _scale(
        self, party: Party, logits: FloatArray, state: RecordDict
    ) -> tuple[Knowledge, Metrics]:
        event = NonPrivateEvent(unit="example", reason=words.PRIVATE_SCALE)
        ledger = spend(party, [(event, 1)], "fedkd scale", DEFAULT_DELTA, state)
        state[words.LOGITS] = encode_arrays({words.LOGITS: logits})
        largest = float(np.abs(logits).max())
        metrics = privacy_metrics(party=unprotected(words.PRIVATE_SCALE), example=ledger)
        return Knowledge("scale", {"scale": np.array([largest])}), metrics

    def _counts(
        self, party: Party, config: ConfigRecord, weights: words.Weights
    ) -> tuple[dict[str, Array], list[Entry]]:
        """Return the class counts to be sent, if any, and what they cost."""
        if weights == "uniform":
            return {}, []
        count = both_counts if weights in words.EVIDENCE else class_counts
        counts = count(_rows(party, config)[1], party.num_classes, party.task)
        if weights not in words.NOISY:
            event = NonPrivateEvent(unit="example", reason=words.EXACT_COUNTS)
            return {CLASS_COUNTS: counts.astype(np.float64)}, [(event, 1)]
        epsilon = config_float(config, words.COUNT_EPSILON, minimum=1e-6, maximum=100)
        mechanism = words.count_mechanism(party.task, party.num_classes, epsilon, weights)
        seeded = config.get(words.SEEDED_NOISE) is True
        rng = party.rng(read_seed(config), "counts") if seeded else None
        release = mechanism.release(counts, rng)
        valid = valid_counts(release.values, mechanism.scale)
        return {CLASS_COUNTS: valid}, list(release.charges)


def _views(party: Party, config: ConfigRecord) -> list[Array]:
    """Return the public rows as often as they are to be predicted."""
    most = max(1, MAX_REPLY_BYTES // (4 * party.public.shape[0] * party.num_classes))
    times = config_int(config, words.NUM_PREDICTIONS, minimum=1, maximum=most)
    name = str(config.get(words.AUGMENTATION))
    check_augmentation(party.owner, name, party.public, times)
    seed = read_seed(config)
    return [augmented(party.public, name, seed, number) for number in range(times)]


def _to_wire(party: Party, scores: FloatArray, config: ConfigRecord) -> Array:
    """Return scores at the levels that were asked for."""
    if not np.isfinite(scores).all():
        raise InvalidData(f"{party.owner}: logits must be finite, got NaN or infinity.")
    bound = config_float(config, words.BOUND, minimum=1e-12, maximum=words.MAX_BOUND)
    levels = config_int(config, words.NUM_LEVELS, minimum=0, maximum=MAX_LEVELS)
    rounding: Rounding = config_choice(config, words.ROUNDING, ROUNDINGS)  # type: ignore[assignment]
    form = score_format(levels, bound, rounding)
    return form.to_wire(scores, party.rng(read_seed(config), "rounding"))


def _rows(party: Party, config: ConfigRecord) -> tuple[Array, Array]:
    if config.get(words.PUBLIC_LABELS) is not True:
        return party.x, party.y
    if party.public_y is None:
        raise InvalidData(
            f"{party.owner}: public_y must be given to train on public labels, got none."
        )
    return np.concatenate([party.x, party.public]), np.concatenate([party.y, party.public_y])
