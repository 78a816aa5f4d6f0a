"""References that are no federation: PATE on pooled data, and labelled public rows alone."""

import logging
from collections.abc import Sequence

import numpy as np

from fl_strategies._util.randomness import derive_rng
from fl_strategies.aggregation.votes import count_votes, plurality
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.learners import Learner, fit_ensemble
from fl_strategies.tasks import Judgement
from simulations.federation import Federation

logger = logging.getLogger("flwr.fl_strategies")


def judge_pate(federation: Federation) -> Judgement:
    """Train PATE (Papernot et al., ICLR 2017), without noise, on the pooled private rows.

    All rows are dealt at random to as many teachers as the parties of the federation have
    in one partition, so that a teacher has as many rows as one of FedKT on average. Their
    votes on the public rows, ties decided at random, train the final learner.
    """
    data, seed = federation.dataset, federation.settings.seed
    fits, rule = data.task == "single-label", "false unless rows have one label each"
    require(fits, "Settings", "pate", rule, federation.settings.pate)
    logger.info("Training PATE on the pooled data for comparison.")
    votes = np.stack([teacher.predict(data.x_public) for teacher in _teachers(federation)])
    counts = count_votes(votes, data.num_classes)
    labels = plurality(counts, derive_rng(seed, "pate", "ties"))
    student, rng = federation.final_factory()(), derive_rng(seed, "pate", "student")
    return federation.judge(student.fit(data.x_public, labels, rng=rng))


def _teachers(federation: Federation) -> Sequence[Learner]:
    """Train the teachers, of the parties' kinds in turn, each on rows of its own."""
    data, settings = federation.dataset, federation.settings
    number = num_pate_teachers(federation)
    order = derive_rng(settings.seed, "pate", "split").permutation(len(data.y_train))
    dealt = np.array_split(order, number)
    names = (settings.teacher,) if settings.teacher else federation.learner_names
    teachers: list[Learner] = []
    for kind, name in enumerate(names):
        mine = range(kind, number, len(names))
        sets = [(data.x_train[dealt[one]], data.y_train[dealt[one]]) for one in mine]
        rngs = [derive_rng(settings.seed, "pate", "teacher", one) for one in mine]
        teachers += fit_ensemble(federation.factory(name), sets, rngs=rngs)
    return teachers


def num_pate_teachers(federation: Federation) -> int:
    """Return how many teachers PATE has: all of one partition, but no more than rows."""
    per_party: int = getattr(federation.settings.options, "num_teachers", None) or 1
    number = federation.settings.num_parties * per_party
    return min(number, len(federation.dataset.y_train))


def judge_public(federation: Federation) -> Judgement:
    """Train the final learner on the public rows with their own labels, nothing private."""
    data = federation.dataset
    if data.y_public is None:
        raise InvalidParameter(
            "Settings: public-only must be false unless public rows have labels, got true."
        )
    logger.info("Training on the labelled public rows for comparison.")
    model, rng = federation.final_factory()(), derive_rng(federation.settings.seed, "public")
    return federation.judge(model.fit(data.x_public, data.y_public, rng=rng))
