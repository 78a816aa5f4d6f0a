"""Options of FedKD, what it releases, and the keys both sides share.

Server and parties change the public rows in the same way, from a named stream of the
experiment's seed, so only predictions travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np

from fl_strategies._util import Array, derive_rng
from fl_strategies.errors import require, require_data
from fl_strategies.learners import Link, Recipe, Task, plan_of
from fl_strategies.options import Options, group, option
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA, cost_of
from fl_strategies.privacy.mechanisms import Charges, LaplaceCounts
from fl_strategies.privacy.noise import ScoreMechanism, ScorePrivacy
from fl_strategies.privacy.planning import Draft, Facts
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.wire.knowledge import MAX_LEVELS, Rounding

Augmentation: TypeAlias = Literal["none", "crop", "crop-flip"]

PADDING: Final = 4


def crop(rows: Array, rng: np.random.Generator) -> Array:
    """Shift images (n, C, H, W) by up to four pixels; what is shifted in is zero."""
    padded = np.pad(rows, [(0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)])
    height, width = rows.shape[2:]
    top, left = rng.integers(2 * PADDING + 1, size=(2, len(rows), 1, 1, 1))
    which = np.arange(len(rows))[:, None, None, None]
    channels = np.arange(rows.shape[1])[:, None, None]
    lines = top + np.arange(height)[:, None]
    columns = left + np.arange(width)
    shifted: Array = padded[which, channels, lines, columns]
    return shifted


def flip(rows: Array, rng: np.random.Generator) -> Array:
    """Mirror about half of the images (n, C, H, W)."""
    return np.where(rng.random((len(rows), 1, 1, 1)) < 0.5, rows[..., ::-1], rows)


def check_augmentation(owner: str, name: str, rows: Array, num_predictions: int) -> None:
    """Raise unless rows can be predicted so many times, each time slightly changed."""
    fits, rule = num_predictions == 1 or name != "none", "given for more than one prediction"
    require(fits, owner, "augmentation", rule, name)
    if name != "none":
        rule = "images (n, channels, height, width) for an augmentation"
        require_data(rows.ndim == 4, owner, "public", rule, f"shape {rows.shape}")


def augmented(rows: Array, name: str, seed: int, number: int) -> Array:
    """Return the rows of one prediction; the first prediction sees them as they are."""
    if number == 0 or name == "none":
        return rows
    rng = derive_rng(seed, "augmentation", number)
    return crop(flip(rows, rng) if name == "crop-flip" else rows, rng)


Weights: TypeAlias = Literal["evidence", "noisy-evidence", "counts", "noisy-counts", "uniform"]
Scale: TypeAlias = Literal["clip", "max"]
DistillationLoss: TypeAlias = Literal["l1", "l2", "mse", "kl"]
Consensus: TypeAlias = Literal["mean", "median", "trimmed-mean"]
Phase: TypeAlias = Literal["scale", "scores"]
"""The requests to parties: with ``scale="max"`` their largest logit first."""

PHASES: Sequence[str] = ("scale", "scores")
PHASE = "request"
BOUND = "bound"
TASK = "task"
LOGITS = "logits"
ERROR = "error"
NUM_UNCOVERED = "num-uncovered"
"""Metric: parties that find the public rows unlike their records."""

MAX_BOUND = 1e6
MAX_PREDICTIONS = 2**20

UNPROTECTED = "logits left the party without noise"
EXACT_COUNTS = "exact class counts left the party"
PRIVATE_SCALE = "the quantization scale is the largest logit of all private models"
INEXACT = "the mean squared error on own records left the party"
COUNTED = "class counts protect examples, not parties"


@dataclass(frozen=True, kw_only=True)
class FedKDOptions(Options):
    """Options of `FedKD`.

    Parameters
    ----------
    num_levels : int or None
        The paper's S; None sends float32 logits.
    rounding : "nearest" or "stochastic"
        See `Quantizer`.
    scale, clip : "clip" or "max", float
        ``"clip"``: logits are cut at `clip`, agreed before, and one round is enough.
        ``"max"``: the paper's largest logit of all parties, asked for in a first round;
        the scores follow in a second, so run two rounds.
    weights : "evidence", "noisy-evidence", "counts", "noisy-counts" or "uniform"
        ``"evidence"``: parties send what their models say beyond the class shares of their
        records, and are weighted by how well they can know a class (`aggregation.evidence`).
        ``"counts"``: logits by Eq. 1 (the paper's), where a class that nobody holds is
        weighted uniformly. ``"uniform"``: logits by 1 / K. With ``"noisy-"`` the class counts
        cost an example `count_epsilon`.
    contrast : bool
        With evidence: parties also learn to tell their records from public rows, which takes
        two more fits of at most 3,000 rows each (`contrasted`).
    class_share : str
        With evidence: the class shares of public rows; see `EvidencePool`.
    exclude_outliers : bool
        With evidence: do not count parties that contradict most others, for which scores are
        kept until all are there (`aggregation.pool`).
    consensus, trim_fraction : "mean", "median" or "trimmed-mean", float
        How scores are combined. The last two, of `RobustConsensus`, hold off wrong scores;
        they need ``weights="uniform"`` and no noise, which is made for means.
    privacy : ScorePrivacy, optional
        The server's noise. The paper's is Lap(1 / gamma).
    delta : float
        Of epsilons where there is no noise of the strategy's own, which has its delta.
    max_epsilon : float, optional
        The server refuses to make a model if epsilon would exceed it.
    loss, temperature : "kl", "l1", "l2" or "mse", float
        Distance of the student's logits to the scores; the authors' code uses ``"l1"``. For
        ``"kl"`` both sides are divided by the temperature (default: 1) before the softmax, or
        the sigmoid of multi-label learning (Eq. 5 and 6). For the norms it is infinite (Eq. 7).
    distill_epochs : int, optional
        Passes over the public rows; the learner's own number by default.
    num_predictions, augmentation : int, "none", "crop" or "crop-flip"
        How often each party predicts every public row, each time but the first changed by
        the augmentation. All predictions travel and are learned from (Table 2).
    public_labels : bool
        Parties also train on the public rows, whose labels they hold (Table 4).
    """

    owner: ClassVar[str] = "FedKD"

    num_levels: int | None = option(
        200, "the paper's S: levels of a logit; 0: float32", least=2, most=MAX_LEVELS
    )
    rounding: Rounding = option("nearest", "how logits are rounded to levels")
    scale: Scale = option("clip", "bound of levels: a public one, or the largest logit")
    clip: float = option(10.0, "largest logit that counts", above=0, most=MAX_BOUND)
    weights: Weights = option("evidence", "how parties are weighted")
    count_epsilon: float = option(
        1.0, "what noisy counts cost an example", least=1e-6, most=100
    )
    contrast: bool = option(True, "parties tell their records from public rows")
    class_share: str = option(
        "auto", "class shares of public rows: auto, pooled, none, or numbers"
    )
    exclude_outliers: bool = option(True, "no evidence of parties that contradict most others")
    consensus: Consensus = option("mean", "how scores are combined")
    trim_fraction: float = option(
        0.2, "share that trimmed-mean cuts off each side", least=0, below=0.5
    )
    privacy: ScorePrivacy | None = group(ScorePrivacy)
    delta: float = option(DEFAULT_DELTA, "delta of every epsilon", above=0, below=1)
    max_epsilon: float | None = option(None, "budget of the server; 0: none", above=0)
    loss: DistillationLoss = option("kl", "distance of logits")
    temperature: float | None = option(None, "of the kl loss; 0: 1", above=0)
    distill_epochs: int | None = option(None, "passes of distillation; 0: the model's", least=1)
    num_predictions: int = option(
        1, "predictions of each public row", least=1, most=MAX_PREDICTIONS
    )
    augmentation: Augmentation = option("none", "change between these predictions")
    public_labels: bool = option(False, "parties also train on public labels")

    def __post_init__(self) -> None:
        """Check what goes together."""
        super().__post_init__()
        fits = self.consensus == "mean" or (self.weights == "uniform" and self.privacy is None)
        self.require("consensus", fits, "mean unless weights are uniform, without noise")
        if self.sends_evidence:
            rule = "'uniform' or 'noisy-counts' with noise at the server, made for logits"
            self.require("weights", self.privacy is None, rule)
            rule = "'clip' with evidence, which has a bound of its own"
            self.require("scale", self.scale == "clip", rule)
        fits = self.loss == "kl" or self.temperature is None
        self.require("temperature", fits, "omitted unless loss is 'kl'")
        target = self.privacy.target_epsilon if self.privacy else None
        left = not self.counts_noisily or target is None or self.count_epsilon < target
        self.require("count_epsilon", left, "below target_epsilon")

    @property
    def sends_evidence(self) -> bool:
        """Whether parties send evidence instead of logits."""
        return self.weights in ("evidence", "noisy-evidence")

    def check_task(self, owner: str, task: Task) -> None:
        """Raise `InvalidParameter` for settings that numeric targets do not have."""
        if task != "regression":
            return
        plain = self.privacy is None and not self.counts_noisily
        rule = "none for numeric targets, for which fedmoments has some"
        require(plain, owner, "noise", rule, self.weights if self.privacy is None else "some")
        require(self.scale == "clip", owner, "scale", "'clip' for numeric targets", self.scale)
        rule = "'mean' for numeric targets"
        require(self.consensus == "mean", owner, "consensus", rule, self.consensus)

    @property
    def counts_noisily(self) -> bool:
        """Whether class counts leave with noise, at the price of `count_epsilon`."""
        return self.weights in ("noisy-evidence", "noisy-counts")

    @property
    def counts_exactly(self) -> bool:
        """Whether class counts leave as they are."""
        return self.weights in ("evidence", "counts")

    @property
    def seeded_noise(self) -> bool:
        """Whether noise comes from the seed and protects nobody."""
        return bool(self.privacy and self.privacy.seeded_noise)

    def recipe(self, task: Task) -> Recipe:
        """Return the paper's loss: a norm of logits, or a divergence at some temperature."""
        if self.loss != "kl":
            return Recipe(loss=self.loss, epochs=self.distill_epochs)
        link: Link = "sigmoid" if task == "multi-label" else "softmax"
        warm = self.temperature or 1.0
        return Recipe(
            loss="cross-entropy", link=link, temperature=warm, epochs=self.distill_epochs
        )

    def count_mechanism(self, task: Task, num_classes: int) -> LaplaceCounts:
        """Return the noise on class counts, for the most by which one record can move them.

        With one class a record leaves one count and enters another. With several labels it
        may change all positives; where negatives are counted too, those as well.
        """
        per_label = 2 if self.sends_evidence else 1
        moved = per_label * num_classes if task == "multi-label" else 2
        # Of positives alone, a record that has them all moves as many by coming as by changing.
        halved = task != "multi-label" or per_label == 2
        return LaplaceCounts(
            epsilon=self.count_epsilon, l1_sensitivity=float(moved), halved=halved
        )


_LOGIT_BOUND: Final = 10.0


def release_plan(
    options: FedKDOptions, facts: ReleaseFacts, phase: Phase, bound: float | None = None
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
        fits=3 if facts.task == "regression" else 1,
        predictions=options.num_predictions * facts.num_public,
        unit="party" if options.weights == "uniform" else "example",
        delta=privacy.delta if privacy else options.delta,
        audience=AUDIENCES["L1"],
        reason=PRIVATE_SCALE if scale else UNPROTECTED,
        price=lambda: _price(options, facts, phase, bound),
    )


def _price(
    options: FedKDOptions, facts: ReleaseFacts, phase: Phase, bound: float | None
) -> Price:
    num_rows = facts.num_records + options.public_labels * facts.num_public
    training = () if facts.trainer is None else tuple(plan_of(facts.trainer(), num_rows))
    if facts.task == "regression":
        record = (*open_charges(UNPROTECTED), *open_charges(INEXACT))
        return Price(record=record, unprotected=(UNPROTECTED, INEXACT))
    if phase == "scale":
        record = open_charges(PRIVATE_SCALE)
        return Price(record=record, training=training, unprotected=(PRIVATE_SCALE,))
    noisy: Charges = ()
    if options.counts_noisily:
        noise = options.count_mechanism(facts.task, facts.num_classes)
        noisy = tuple(noise.charges(seeded=options.seeded_noise))
    counts = open_charges(EXACT_COUNTS) if options.counts_exactly else noisy
    reasons = [UNPROTECTED] if options.privacy is None else []
    if options.counts_exactly:
        reasons.append(EXACT_COUNTS)
    published: Charges = ()
    if options.privacy is not None and facts.num_parties and bound is not None:
        entries = options.num_predictions * facts.num_public * facts.num_classes
        mechanism = score_mechanism(options, options.privacy, facts, bound)
        published = tuple(options.privacy.charges(mechanism, entries))
    return Price(
        record=(*counts, *(training or open_charges(UNPROTECTED))),
        training=training,
        unprotected=tuple(reasons),
        answers=noisy,
        published=published,
    )


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

    def _mechanism(
        self, facts: Facts, *, sigma: float | None = None
    ) -> tuple[ScoreMechanism, Sequence[Entry]]:
        """Return the noise of the target, or of a given sigma, and its charges."""
        target = facts.target_epsilon if sigma is None else None
        privacy = ScorePrivacy(
            noise="gaussian", sigma=sigma, target_epsilon=target, delta=facts.delta
        )
        mechanism = privacy.mechanism(
            unit=self.unit,
            bound=_LOGIT_BOUND,
            num_values=facts.num_classes,
            num_contributors=facts.num_parties,
            num_rows=facts.num_public,
        )
        entries = facts.num_public * facts.num_classes
        return mechanism, privacy.charges(mechanism, entries)

    def problem(self, facts: Facts) -> str:
        """Say if noise is more than the largest mean score."""
        # Asks for the cost of the most useful noise: a calibration takes thirty times as long.
        _, charges = self._mechanism(facts, sigma=_LOGIT_BOUND)
        if cost_of([charges], facts.delta) <= facts.target_epsilon:
            return ""
        mechanism, _ = self._mechanism(facts)
        return f"deviation {mechanism.scale:.3g} on scores up to {_LOGIT_BOUND:g}"

    def draft(self, facts: Facts) -> Draft:
        """Return the noise on the scores of all public rows."""
        mechanism, charges = self._mechanism(facts)
        return Draft(
            noise="gaussian",
            scale=mechanism.scale,
            asked="queries",
            num_asked=facts.num_public,
            voters=f"{facts.num_parties} parties' mean, up to {_LOGIT_BOUND:g}",
            right=facts.right_labels("gaussian", mechanism.scale, _LOGIT_BOUND),
            batches=[charges],
            settings="weights=uniform noise=gaussian",
        )
