"""Keyword arguments that all strategies share, their rules, and whom a round asks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from fl_strategies.core.callbacks import OnRound
from fl_strategies.exceptions import require
from fl_strategies.randomness import derive_rng


class FederationOptions(TypedDict, total=False):
    """Keyword arguments that all strategies take; see `KnowledgeStrategy`."""

    num_parties: int
    min_available_nodes: int
    min_parties: int
    fraction_train: float
    min_train_nodes: int
    max_wait: float
    seed: int
    evaluate: bool
    max_reply_bytes: int
    half_precision: bool
    members: Mapping[int, int] | None
    checkpoint_dir: str | Path | None
    resume: bool
    on_round: OnRound | Sequence[OnRound] | None


DEFAULT_PARTIES = 2


def expected_parties(owner: str, options: FederationOptions) -> int:
    """Return how many parties to wait for, by our name for it or by Flower's."""
    number = options.get("num_parties", options.get("min_available_nodes", DEFAULT_PARTIES))
    same = options.get("min_available_nodes", number) == number
    rule = f"omitted, or num_parties={number}, which means the same"
    require(same, owner, "min_available_nodes", rule, options.get("min_available_nodes"))
    return number


def sample(
    nodes: Sequence[int], options: FederationOptions, seed: int, server_round: int
) -> list[int]:
    """Return the nodes of a round as Flower would: a share of them, but not too few.

    The experiment's seed decides, so a round that is resumed asks the same nodes again.
    """
    wanted = max(
        int(len(nodes) * options.get("fraction_train", 1.0)), options.get("min_train_nodes", 1)
    )
    if wanted >= len(nodes):
        return list(nodes)
    rng = derive_rng(seed, "sampling", server_round)
    chosen = rng.choice(len(nodes), size=wanted, replace=False)
    return [nodes[i] for i in sorted(chosen)]


def check_federation(owner: str, options: FederationOptions) -> None:
    """Raise `InvalidParameter` for an option that breaks its rule."""
    num_parties = expected_parties(owner, options)
    require(num_parties >= 1, owner, "num_parties", "at least 1", num_parties)
    fewest, rule = options.get("min_parties", 1), f"from 1 to num_parties={num_parties}"
    require(1 <= fewest <= num_parties, owner, "min_parties", rule, fewest)
    share, few = options.get("fraction_train", 1.0), options.get("min_train_nodes", 1)
    require(0 < share <= 1, owner, "fraction_train", "above 0 and at most 1", share)
    require(1 <= few <= num_parties, owner, "min_train_nodes", rule, few)
    wait, seed = options.get("max_wait", 0.0), options.get("seed", 0)
    require(wait >= 0, owner, "max_wait", "at least 0 seconds", wait)
    require(seed >= 0, owner, "seed", "at least 0", seed)
    most = options.get("max_reply_bytes", 1)
    require(most > 0, owner, "max_reply_bytes", "positive", most)
