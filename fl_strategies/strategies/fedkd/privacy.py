"""Release plan of FedKD, and its part of the planner."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

from fl_strategies.learners import plan_of
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.mechanisms import Charges
from fl_strategies.privacy.noise import ScoreMechanism, ScorePrivacy
from fl_strategies.privacy.planning.facts import Draft, Facts
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.strategies.fedkd.options import (
    EXACT_COUNTS,
    PRIVATE_SCALE,
    UNPROTECTED,
    FedKDOptions,
    Phase,
)

_LOGIT_BOUND: Final = 10.0


def release_plan(
    options: FedKDOptions,
    facts: ReleaseFacts,
    phase: Phase,
    bound: float | None = None,
) -> ReleasePlan:
    """Return what one round releases: the largest logit, or scores and class counts.

    The server's noise follows from how many parties have answered (`facts.num_parties`), and
    from the `bound` of their logits.
    """
    privacy, scale = options.privacy, phase == "scale"
    return ReleasePlan(
        name="fedkd",
        purpose="fedkd scale" if scale else "",
        trainer=facts.trainer,
        models=False,
        trusted=privacy is not None,
        seeded=options.seeded_noise,
        predictions=options.num_predictions * facts.num_public,
        unit="party" if options.weights == "uniform" else "example",
        delta=options.delta if privacy is None else privacy.delta,
        audience=AUDIENCES["L1"],
        reason=PRIVATE_SCALE if scale else UNPROTECTED,
        price=lambda: _price(options, facts, phase, bound),
    )


def _price(
    options: FedKDOptions, facts: ReleaseFacts, phase: Phase, bound: float | None
) -> Price:
    num_rows = facts.num_records + options.public_labels * facts.num_public
    training = () if facts.trainer is None else tuple(plan_of(facts.trainer(), num_rows))
    if phase == "scale":
        record = open_charges(PRIVATE_SCALE)
        return Price(record=record, training=training, unprotected=(PRIVATE_SCALE,))
    noisy = _noisy_counts(options, facts)
    counts = open_charges(EXACT_COUNTS) if options.counts_exactly else noisy
    reasons = [UNPROTECTED] if options.privacy is None else []
    published: Charges = ()
    if options.privacy is not None and facts.num_parties and bound is not None:
        entries = options.num_predictions * facts.num_public * facts.num_classes
        mechanism = score_mechanism(options, options.privacy, facts, bound)
        published = tuple(options.privacy.charges(mechanism, entries))
    return Price(
        record=(*counts, *(training or open_charges(UNPROTECTED))),
        training=training,
        unprotected=(*reasons, *([EXACT_COUNTS] if options.counts_exactly else [])),
        answers=noisy,
        published=published,
    )


def _noisy_counts(options: FedKDOptions, facts: ReleaseFacts) -> Charges:
    if not options.counts_noisily:
        return ()
    noise = options.count_mechanism(facts.task, facts.num_classes)
    return tuple(noise.charges(seeded=options.seeded_noise))


@lru_cache(maxsize=8)  # calibrated for the price, and asked for again to draw the noise
def score_mechanism(
    options: FedKDOptions, privacy: ScorePrivacy, facts: ReleaseFacts, bound: float
) -> ScoreMechanism:
    """Return the server's noise on the mean of all parties' scores (Eq. 2)."""
    uniform = options.weights == "uniform"
    counts = options.count_mechanism(facts.task, facts.num_classes)
    return privacy.mechanism(
        unit="party" if uniform else "example",
        # Weights that parties' counts decide may give one party all of a class.
        bound=bound if uniform else bound * facts.num_parties,
        num_values=facts.num_classes,
        num_contributors=facts.num_parties,
        num_rows=options.num_predictions * facts.num_public,
        besides=counts.charges() if options.weights == "noisy-counts" else (),
    )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """`FedKD` with Gaussian noise on the mean scores of all public rows, at the server.

    A party moves every score of every row, and so may one of its records: with equal weights
    the two promises are one. The lead of a class is its margin times the bound of a row.
    """

    unit: Unit
    trusts_server: ClassVar[bool] = True
    knobs: ClassVar[Sequence[str]] = ("num_parties", "num_public", "target_epsilon")

    name: ClassVar[str] = "fedkd noise"

    def _mechanism(self, facts: Facts) -> tuple[ScorePrivacy, ScoreMechanism]:
        privacy = ScorePrivacy(
            noise="gaussian", target_epsilon=facts.target_epsilon, delta=facts.delta
        )
        mechanism = privacy.mechanism(
            unit=self.unit,
            bound=_LOGIT_BOUND,
            num_values=facts.num_classes,
            num_contributors=facts.num_parties,
            num_rows=facts.num_public,
        )
        return privacy, mechanism

    def problem(self, facts: Facts) -> str:
        """Say if noise is more than the largest mean score."""
        _, mechanism = self._mechanism(facts)
        if mechanism.scale <= _LOGIT_BOUND:
            return ""
        return f"deviation {mechanism.scale:.3g} on scores up to {_LOGIT_BOUND:g}"

    def draft(self, facts: Facts) -> Draft:
        """Return the noise on the scores of all public rows."""
        privacy, mechanism = self._mechanism(facts)
        entries = facts.num_public * facts.num_classes
        return Draft(
            noise="gaussian",
            scale=mechanism.scale,
            asked="queries",
            num_asked=facts.num_public,
            voters=f"{facts.num_parties} parties' mean, up to {_LOGIT_BOUND:g}",
            right=facts.right_labels("gaussian", mechanism.scale, _LOGIT_BOUND),
            batches=[privacy.charges(mechanism, entries)],
            settings="weights=uniform noise=gaussian",
        )
