"""The party's half of FedKD; see `fl_strategies.fedkd`."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies.augmentation import augmented, check_augmentation
from fl_strategies.class_weights import CLASS_COUNTS, class_counts
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
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.reporting import (
    DEFAULT_DELTA,
    privacy_metrics,
    spend,
    training_charges,
    unprotected,
)
from fl_strategies.protocols import Array, FloatArray, Learner
from fl_strategies.quantization import MAX_LEVELS, ROUNDINGS, Rounding, score_format


class FedKDParty(PartyHalf):
    """The party's half: a model of its own, and its logits on the public rows."""

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
        logits, model = self._logits(party, config, state)
        if config_choice(config, words.REQUEST, words.REQUESTS) == "scale":
            return self._scale(party, logits, state)
        bound = config_float(config, words.BOUND, minimum=1e-12, maximum=words.MAX_BOUND)
        levels = config_int(config, words.NUM_LEVELS, minimum=0, maximum=MAX_LEVELS)
        rounding: Rounding = config_choice(config, words.ROUNDING, ROUNDINGS)  # type: ignore[assignment]
        form = score_format(levels, bound, rounding)
        scores = form.to_wire(logits, party.rng(read_seed(config), "rounding"))
        counts, charges = self._counts(party, config)
        trained = training_charges([model], 1) if model is not None else ()
        charges += trained or [(NonPrivateEvent(unit="example", reason=words.UNPROTECTED), 1)]
        ledger = spend(party, charges, "fedkd", DEFAULT_DELTA, state)
        metrics = privacy_metrics(party=unprotected(words.UNPROTECTED), example=ledger)
        return Knowledge("scores", {"scores": scores, **counts}), metrics

    def _logits(
        self, party: Party, config: ConfigRecord, state: RecordDict
    ) -> tuple[FloatArray, Learner | None]:
        """Return logits on all public rows, and the model unless an earlier round had it."""
        most = max(1, MAX_REPLY_BYTES // (4 * party.public.shape[0] * party.num_classes))
        times = config_int(config, words.NUM_PREDICTIONS, minimum=1, maximum=most)
        kept = state.pop(words.LOGITS, None)  # another request starts anew
        if isinstance(kept, ArrayRecord):
            logits = decode_array(words.LOGITS, kept[words.LOGITS])
            if len(logits) == times * len(party.public):
                return logits, None
        seed, (x, y) = read_seed(config), _training_rows(party, config)
        model = party.learner_fn().fit(x, y, rng=party.rng(seed, "model"))
        name = str(config.get(words.AUGMENTATION))
        check_augmentation(party.owner, name, party.public, times)
        parts = [model.logits(augmented(party.public, name, seed, i)) for i in range(times)]
        logits = np.concatenate(parts)
        if party.task == "single-label":
            logits = logits - logits.mean(axis=1, keepdims=True)
        if not np.isfinite(logits).all():
            raise InvalidData(f"{party.owner}: logits must be finite, got NaN or infinity.")
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
        self, party: Party, config: ConfigRecord
    ) -> tuple[dict[str, Array], list[Entry]]:
        """Return the class counts to be sent, if any, and what they cost."""
        weights = config_choice(config, words.WEIGHTING, words.WEIGHTS)
        if weights == "uniform":
            return {}, []
        counts = class_counts(party.y, party.num_classes, party.task)
        if weights == "counts":
            event = NonPrivateEvent(unit="example", reason=words.EXACT_COUNTS)
            return {CLASS_COUNTS: counts.astype(np.float64)}, [(event, 1)]
        epsilon = config_float(config, words.COUNT_EPSILON, minimum=1e-6, maximum=100)
        mechanism = words.count_mechanism(party.task, party.num_classes, epsilon)
        seeded = config.get(words.SEEDED_NOISE) is True
        rng = party.rng(read_seed(config), "counts") if seeded else None
        release = mechanism.release(counts, rng)
        return {CLASS_COUNTS: release.values}, list(release.charges)


def _training_rows(party: Party, config: ConfigRecord) -> tuple[Array, Array]:
    if config.get(words.PUBLIC_LABELS) is not True:
        return party.x, party.y
    if party.public_y is None:
        raise InvalidData(
            f"{party.owner}: public_y must be given to train on public labels, got none."
        )
    return np.concatenate([party.x, party.public]), np.concatenate([party.y, party.public_y])
