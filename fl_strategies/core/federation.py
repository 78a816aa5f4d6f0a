"""Keyword arguments that all strategies share, and their rules."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from fl_strategies.exceptions import require


class FederationOptions(TypedDict, total=False):
    """Keyword arguments that all strategies take; see `KnowledgeStrategy`."""

    num_parties: int
    min_parties: int
    max_wait: float
    seed: int
    evaluate: bool
    max_reply_bytes: int
    members: Mapping[int, int] | None
    checkpoint_dir: str | Path | None
    resume: bool


def check_federation(owner: str, options: FederationOptions) -> None:
    """Raise `InvalidParameter` for an option that is unknown or breaks its rule."""
    unknown = sorted(set(options) - set(FederationOptions.__annotations__))
    require(not unknown, owner, "options", "known ones", unknown)
    num_parties = options["num_parties"]
    require(num_parties >= 1, owner, "num_parties", "at least 1", num_parties)
    fewest, rule = options.get("min_parties", 1), f"from 1 to num_parties={num_parties}"
    require(1 <= fewest <= num_parties, owner, "min_parties", rule, fewest)
    wait, seed = options.get("max_wait", 0.0), options.get("seed", 0)
    require(wait >= 0, owner, "max_wait", "at least 0 seconds", wait)
    require(seed >= 0, owner, "seed", "at least 0", seed)
    most = options.get("max_reply_bytes", 1)
    require(most > 0, owner, "max_reply_bytes", "positive", most)
