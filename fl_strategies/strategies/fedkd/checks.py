"""What FedKD's server accepts, of its user and of parties."""

import math

import numpy as np

from fl_strategies.aggregation.consensus import ROBUST_RULES, ConsensusRule, check_trim
from fl_strategies.aggregation.evidence_pool import CONTRASTS, Contrast
from fl_strategies.core.protocols import Link, Recipe
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import KnowledgeMismatch, require
from fl_strategies.strategies.fedkd import words
from fl_strategies.wire.knowledge import Knowledge, shown


def check_consensus(rule: ConsensusRule, trim_fraction: float, *, plain: bool) -> None:
    """Raise unless the rule fits; `plain`: weights are uniform and nothing is noisy."""
    known = ("mean", *ROBUST_RULES)
    require(rule in known, "FedKD", "consensus", f"one of {', '.join(known)}", rule)
    check_trim("FedKD", trim_fraction)
    fits = plain or rule == "mean"
    require(fits, "FedKD", "consensus", "mean unless weights are uniform, without noise", rule)


def check_evidence(scale: words.Scale, *, noisy: bool) -> None:
    """Raise unless evidence can be combined as asked."""
    rule = "'uniform' or 'noisy-counts' with noise at the server, which is made for logits"
    require(not noisy, "FedKD", "weights", rule, "evidence")
    rule = "'clip' with evidence, which has a bound of its own"
    require(scale == "clip", "FedKD", "scale", rule, scale)


def read_contrast(knowledge: Knowledge) -> Contrast:
    """Return how a party says its records relate to public rows."""
    contrast = knowledge.meta.get(words.CONTRAST)
    if contrast not in CONTRASTS:
        raise KnowledgeMismatch(
            f"scores: {words.CONTRAST} must be one of {', '.join(CONTRASTS)}, "
            f"got {shown(contrast)}."
        )
    return contrast  # type: ignore[return-value]


def make_recipe(
    task: Task, loss: words.DistillationLoss, temperature: float | None, epochs: int | None
) -> Recipe:
    """Return the paper's loss: a norm of logits, or a divergence at some temperature."""
    if loss != "kl":
        hot = temperature in (None, math.inf)
        require(hot, "FedKD", "temperature", "left out unless loss is 'kl'", temperature)
        return Recipe(loss=loss, epochs=epochs)
    warm = 1.0 if temperature is None else temperature
    finite = 0 < warm < math.inf
    require(finite, "FedKD", "temperature", "finite and above 0 for 'kl'", temperature)
    link: Link = "sigmoid" if task == "multi-label" else "softmax"
    return Recipe(loss="cross-entropy", link=link, temperature=warm, epochs=epochs)


def read_scale(knowledge: Knowledge) -> float:
    """Return a party's largest logit."""
    scale = knowledge.arrays.get("scale", np.empty(0))
    if scale.dtype != np.float64 or scale.shape != (1,) or not 0 < scale[0] <= words.MAX_BOUND:
        raise KnowledgeMismatch(
            f"scale: the largest logit must be one number above 0, at most "
            f"{words.MAX_BOUND:g}, got {scale.ravel()[:4]} of {scale.dtype}."
        )
    return float(scale[0])
