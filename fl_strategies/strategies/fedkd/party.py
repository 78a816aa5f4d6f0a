"""The party's role in FedKD; see `fl_strategies.strategies.fedkd`."""

from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray
from fl_strategies.aggregation.evidence import (
    CLASS_COUNTS,
    both_counts,
    class_counts,
    class_evidence,
    label_evidence,
    valid_counts,
)
from fl_strategies.aggregation.pool import Contrast
from fl_strategies.errors import require_known
from fl_strategies.learners import Learner
from fl_strategies.party.party import Party
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
    CONTRAST,
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

    def fitting_logits(self, num_rows: int) -> FloatArray | None:
        """Return the logits if they are of so many public rows."""
        logits = self.logits
        return logits if logits is not None and len(logits) == num_rows else None


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
        work = _Work.read(party, config, kept)
        # Charged before a record is looked at; logits that are kept have been paid for.
        facts = facts_of(party) if work.kept is None else replace(facts_of(party), trainer=None)
        plan = release_plan(work.options, facts, work.phase)
        work.price, _, metrics = charge_plan(party, plan, state)
        if work.options.sends_evidence:
            return self._evidence(party, work), metrics
        logits = self._logits(party, work, kept)
        if work.phase == "scale":
            kept.logits = logits
            largest = float(np.abs(logits).max())
            return Knowledge("scale", {"scale": np.array([largest])}), metrics
        scores, counts = work.to_wire(party, logits), _counts(party, work)
        return Knowledge("scores", {"scores": scores, **counts}), metrics

    def _evidence(self, party: Party, work: "_Work") -> Knowledge:
        """Return the model's logits without the class shares of its records."""
        arrays, logits = _counts(party, work), self._fitted_logits(party, work)
        counts = np.asarray(arrays[CLASS_COUNTS], dtype=np.float64)
        contrast: Contrast = "none"
        if party.task == "multi-label":
            evidence = label_evidence(logits, counts[0], counts[1])
        else:
            views = _views(party, work)
            wanted = work.makes_contrast
            ratio, contrast = (
                contrasted(party, views, work.seed) if wanted else (None, contrast)
            )
            evidence = class_evidence(logits, counts, ratio)
        scores = work.to_wire(party, evidence)
        return Knowledge("scores", {"scores": scores, **arrays}, {CONTRAST: contrast})

    def _logits(self, party: Party, work: "_Work", state: FedKDPartyState) -> FloatArray:
        """Return centred logits on all public rows, those of an earlier request if kept."""
        state.logits = None  # another request starts anew
        if work.kept is not None:
            return work.kept
        logits = self._fitted_logits(party, work)
        if party.task == "single-label":
            logits = logits - logits.mean(axis=1, keepdims=True)
        return logits

    def _fitted_logits(self, party: Party, work: "_Work") -> FloatArray:
        """Train the party's model and ask it about every view of the public rows."""
        rng = party.rng(work.seed, "model")
        promised = is_promise(work.price.record)

        def fit() -> Learner:
            model = party.learner_fn().fit(*_rows(party, work.options), rng=rng)
            require_plan(model, work.price.training)
            return model

        model = trained(fit, lambda: public_model(party, party.learner_fn), promised=promised)
        views = _views(party, work)
        answers = [finite_logits(party.owner, model, view, promised=promised) for view in views]
        return np.concatenate(answers)


@dataclass(kw_only=True, eq=False)
class _Work:
    """What a party is asked for and what that will cost, known without its records."""

    options: FedKDOptions
    phase: Phase
    bound: float
    seed: int
    kept: FloatArray | None
    price: Price = field(default_factory=Price)

    @classmethod
    def read(cls, party: Party, config: ConfigRecord, state: FedKDPartyState) -> "_Work":
        """Read the server's request, and what an earlier one has left."""
        options, phase, bound = FedKDOptions.received(config), *_read_phase(config)
        _check_views(party, options)
        lacks = options.public_labels and party.public_y is None
        rule = "given to train on public labels"
        require_known(not lacks, party.owner, "public_y", rule, "none")
        num_rows = options.num_predictions * len(party.public)
        kept = None if options.sends_evidence else state.fitting_logits(num_rows)
        return cls(
            options=options,
            phase=phase,
            bound=bound,
            seed=read_seed(config),
            kept=kept,
        )

    @property
    def makes_contrast(self) -> bool:
        """Whether records are told from public rows; never after private training."""
        options = self.options
        return options.contrast and not options.public_labels and not self.price.training

    def to_wire(self, party: Party, scores: FloatArray) -> Array:
        """Return scores at the levels that were asked for."""
        form = score_format(self.options.num_levels, self.bound, self.options.rounding)
        return form.to_wire(scores, party.rng(self.seed, "rounding"))


def _read_phase(config: ConfigRecord) -> tuple[Phase, float]:
    """Return what is asked for and the bound of scores, of no meaning for a scale."""
    phase: Phase = config_choice(config, PHASE, PHASES)  # type: ignore[assignment]
    if phase == "scale":
        return phase, 1.0
    return phase, config_float(config, BOUND, minimum=1e-12, maximum=MAX_BOUND)


def _check_views(party: Party, options: FedKDOptions) -> None:
    """Raise unless public rows can be predicted as often as asked, in one reply."""
    most = max(1, MAX_REPLY_BYTES // (4 * party.public.shape[0] * party.num_classes))
    times, rule = options.num_predictions, f"at most {most}, so that a reply holds them"
    require_known(times <= most, party.owner, "num-predictions", rule, times)
    check_augmentation(party.owner, options.augmentation, party.public, times)


def _counts(party: Party, work: _Work) -> dict[str, Array]:
    """Return the class counts to be sent, if any; they have been charged before."""
    options = work.options
    if options.weights == "uniform":
        return {}
    count = both_counts if options.sends_evidence else class_counts
    counts = count(_rows(party, options)[1], party.num_classes, party.task)
    if options.counts_exactly:
        return {CLASS_COUNTS: counts.astype(np.float64)}
    noise = options.count_mechanism(party.task, party.num_classes)
    rng = party.rng(work.seed, "counts") if options.seeded_noise else None
    return {CLASS_COUNTS: valid_counts(noise.release(counts, rng).values, noise.scale)}


def _views(party: Party, work: _Work) -> list[Array]:
    """Return the public rows as often as they are to be predicted."""
    times, name = range(work.options.num_predictions), work.options.augmentation
    return [augmented(party.public, name, work.seed, number) for number in times]


def _rows(party: Party, options: FedKDOptions) -> tuple[Array, Array]:
    if not options.public_labels:
        return party.x, party.y
    y = np.concatenate([party.y, np.asarray(party.public_y)])
    return np.concatenate([party.x, party.public]), y
