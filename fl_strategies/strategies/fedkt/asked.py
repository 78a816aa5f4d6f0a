"""What a server of FedKT asks of a party, for the party's policy."""

from collections.abc import Sequence

from flwr.app import ConfigRecord

from fl_strategies.core.party import Party
from fl_strategies.core.policy import Request, asked_number
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.votes import VotePrivacy, drowned_votes
from fl_strategies.strategies.fedkt import words
from fl_strategies.wire.config import config_float, config_int


def request_of(party: Party, config: ConfigRecord) -> Request:
    """Return what a message of FedKT asks for."""
    level = str(config.get(words.PRIVACY_LEVEL))
    teachers = min(asked_number(config, words.NUM_TEACHERS), len(party.y))
    # A student for every partition, beside its teachers.
    fits = asked_number(config, words.NUM_SPLITS) * (teachers + 1)
    return Request(
        name=f"fedkt {level}",
        trainer=party.teacher_fn or party.learner_fn,
        models=config.get(words.EXCHANGE) != "votes",
        protected=level == "L2",
        seeded=config.get("seeded-noise") is True,
        fits=fits,
        predictions=fits * len(party.public),
        drowned=lambda: _drowned(party, config) if level == "L2" else "",
    )


def _drowned(party: Party, config: ConfigRecord) -> str:
    """Say how the party's own noise would drown the votes of its teachers."""
    num_splits = config_int(config, words.NUM_SPLITS, minimum=1, maximum=words.MAX_SPLITS)
    queries = config_int(config, words.NUM_QUERIES, minimum=1, maximum=len(party.public))
    counting: Sequence[Entry] = ()
    if config.get(words.VOTE_WEIGHTS) == "noisy-counts":
        epsilon = config_float(config, words.COUNT_EPSILON, minimum=1e-6, maximum=100)
        counting = words.count_noise(epsilon).charges()
    mechanism = VotePrivacy.from_config(config).for_examples(
        party.num_classes, num_splits * queries, besides=counting
    )
    votes = min(asked_number(config, words.NUM_TEACHERS), len(party.y))
    return drowned_votes(mechanism, votes)
