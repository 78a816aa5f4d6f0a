"""The party's role in FedKD; see `fl_strategies.strategies.fedkd`."""

from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray
from fl_strategies.aggregation.pool import CONTRAST
from fl_strategies.aggregation.votes import (
    CLASS_COUNTS,
    both_counts,
    class_counts,
    class_evidence,
    label_evidence,
    valid_counts,
)
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, require_known
from fl_strategies.learners import Learner
from fl_strategies.party.party import LARGEST_VALUE, Party
from fl_strategies.party.role import (
    ArrayField,
    PartyRole,
    PartyState,
    charge_plan,
    check_public_data,
    contrasted,
    facts_of,
    finite_logits,
    is_promise,
    public_model,
    read_seed,
    require_plan,
    trained,
)
from fl_strategies.release import Price, ReleasePlan
from fl_strategies.strategies.fedkd.options import (
    BOUND,
    ERROR,
    LOGITS,
    MAX_BOUND,
    PHASE,
    PHASES,
    TASK,
    FedKDOptions,
    Phase,
    augmented,
    check_augmentation,
    release_plan,
)
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    config_choice,
    config_float,
    score_format,
)


class FedKDPartyState(PartyState):
    """What a party of FedKD keeps between telling its scale and sending its scores."""

    logits = ArrayField(LOGITS, LOGITS)
    """Those that the scale is of, centred."""


class FedKDParty(PartyRole):
    """The party's role: a model of its own, and its logits on the public rows."""

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return that answers leave, about public rows as often as they are predicted."""
        phase: Phase = "scale" if config.get(PHASE) == "scale" else "scores"
        return release_plan(FedKDOptions.received(config), facts_of(party), phase)

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - nothing comes before the end
        config: ConfigRecord,
        state: PartyState,
    ) -> tuple[Knowledge, Metrics]:
        """Return the largest logit, or all logits at the levels asked for."""
        check_public_data(party, config)
        config_choice(config, TASK, [party.task])
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        kept = FedKDPartyState(state.records)
        work = _Work(party, config, kept)
        # Charged before a record is looked at; logits that are kept have been paid for.
        facts = facts_of(party) if work.kept is None else replace(facts_of(party), trainer=None)
        plan = release_plan(work.options, facts, work.phase)
        work.price, _, metrics = charge_plan(party, plan, state)
        if party.task == "regression":
            return work.numbers(), metrics
        if work.options.sends_evidence:
            return work.evidence(), metrics
        kept.logits = None  # another request starts anew
        logits = work.logits()
        if work.phase == "scale":
            kept.logits = logits
            largest = float(np.abs(logits).max())
            return Knowledge("scale", {"scale": np.array([largest])}), metrics
        scores = work.to_wire(logits)
        return Knowledge("scores", {"scores": scores, **work.class_counts()}), metrics


class _Work:
    """What a party is asked for, known without its records, and the steps of its answer."""

    price = Price()
    """Of the answer; it is charged before a record is looked at."""

    def __init__(self, party: Party, config: ConfigRecord, state: FedKDPartyState) -> None:
        self.party, self.seed = party, read_seed(config)
        self.options = options = FedKDOptions.received(config)
        self.phase: Phase = config_choice(config, PHASE, PHASES)  # type: ignore[assignment]
        try:
            options.check_task("Server", party.task)
        except InvalidParameter as error:
            raise KnowledgeMismatch(str(error)) from error
        self.bound = 1.0  # of no meaning for a scale
        if self.phase == "scores":
            self.bound = config_float(config, BOUND, minimum=1e-12, maximum=MAX_BOUND)
        times, num_public = options.num_predictions, len(party.public)
        most = max(1, MAX_REPLY_BYTES // (4 * num_public * party.num_classes))
        rule = f"at most {most}, so that a reply holds them"
        require_known(times <= most, party.owner, "num-predictions", rule, times)
        check_augmentation(party.owner, options.augmentation, party.public, times)
        lacks = options.public_labels and party.public_y is None
        rule = "given to train on public labels"
        require_known(not lacks, party.owner, "public_y", rule, "none")
        # Logits of an earlier request, if they are of so many rows.
        kept = None if options.sends_evidence else state.logits
        self.kept = kept if kept is not None and len(kept) == times * num_public else None

    @property
    def views(self) -> list[Array]:
        """The public rows as often as they are to be predicted."""
        times, name = range(self.options.num_predictions), self.options.augmentation
        return [augmented(self.party.public, name, self.seed, number) for number in times]

    @property
    def rows(self) -> tuple[Array, Array]:
        """The rows and labels that the party learns from."""
        party = self.party
        if not self.options.public_labels:
            return party.x, party.y
        y = np.concatenate([party.y, np.asarray(party.public_y)])
        return np.concatenate([party.x, party.public]), y

    def logits(self) -> FloatArray:
        """Return centred logits on all public rows, those of an earlier request if kept."""
        if self.kept is not None:
            return self.kept
        logits = self._fitted_logits()
        if self.party.task == "single-label":
            logits = logits - logits.mean(axis=1, keepdims=True)
        return logits

    def numbers(self) -> Knowledge:
        """Return predictions, and the mean squared error that tells how exact they are.

        It is that of models of one half of the records on the other half, so that a model
        that knows its records by heart is not taken for exact.
        """
        predictions, (x, y) = self._fitted_logits(), self.rows
        rng, errors = self.party.rng(self.seed, "halves"), []
        halves = np.array_split(rng.permutation(len(y)), 2)
        for learned, others in (halves, halves[::-1]):
            if len(learned) and len(others):
                model = self.party.learner_fn().fit(x[learned], y[learned], rng=rng)
                errors.append(np.square(model.logits(x[others]) - y[others]).ravel())
        error = float(np.concatenate(errors).mean()) if errors else LARGEST_VALUE
        arrays = {"scores": predictions.astype(np.float64), ERROR: np.array([error])}
        arrays[ERROR] = np.nan_to_num(arrays[ERROR], nan=LARGEST_VALUE, posinf=LARGEST_VALUE)
        return Knowledge("scores", arrays)

    def evidence(self) -> Knowledge:
        """Return the model's logits without the class shares of its records."""
        party, sent, logits = self.party, self.class_counts(), self._fitted_logits()
        counts = np.asarray(sent[CLASS_COUNTS], dtype=np.float64)
        ratio, contrast = None, "none"
        if party.task == "multi-label":
            evidence = label_evidence(logits, counts[0], counts[1])
        else:
            wanted = self.options.contrast and not self.options.public_labels
            if wanted and not self.price.training:  # never after private training
                ratio, contrast = contrasted(party, self.views, self.seed)
            evidence = class_evidence(logits, counts, ratio)
        arrays = {"scores": self.to_wire(evidence), **sent}
        return Knowledge("scores", arrays, {CONTRAST: contrast})

    def _fitted_logits(self) -> FloatArray:
        """Train the party's model and ask it about every view of the public rows."""
        party, promised = self.party, is_promise(self.price.record)
        rng = party.rng(self.seed, "model")

        def fit() -> Learner:
            model = party.learner_fn().fit(*self.rows, rng=rng)
            require_plan(model, self.price.training)
            return model

        model = trained(fit, lambda: public_model(party, party.learner_fn), promised=promised)
        return np.concatenate(
            [finite_logits(party.owner, model, view, promised=promised) for view in self.views]
        )

    def to_wire(self, scores: FloatArray) -> Array:
        """Return scores at the levels that were asked for."""
        form = score_format(self.options.num_levels, self.bound, self.options.rounding)
        return form.to_wire(scores, self.party.rng(self.seed, "rounding"))

    def class_counts(self) -> dict[str, Array]:
        """Return the class counts to be sent, if any."""
        party, options = self.party, self.options
        if options.weights == "uniform":
            return {}
        count = both_counts if options.sends_evidence else class_counts
        counts = count(self.rows[1], party.num_classes, party.task)
        if options.counts_exactly:
            return {CLASS_COUNTS: counts.astype(np.float64)}
        noise = options.count_mechanism(party.task, party.num_classes)
        rng = party.rng(self.seed, "counts") if options.seeded_noise else None
        return {CLASS_COUNTS: valid_counts(noise.release(counts, rng).values, noise.scale)}
