"""What a new strategy costs its author: one class for each side and one line of registry."""

import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedProx

from fl_strategies import REGISTRY, Algorithm
from fl_strategies.extend import (
    FloatArray,
    Knowledge,
    KnowledgeMismatch,
    KnowledgeStrategy,
    Options,
    Party,
    PartyRole,
    PartyState,
    Price,
    Recipe,
    ReleasePlan,
    RobustConsensus,
    SoftLearner,
    State,
    WeightsParty,
    charge_plan,
    check_public_data,
    content_hash,
    derive_rng,
    finite_logits,
    flower_strategy,
    keys,
    link_scores,
    open_charges,
    option,
    read_seed,
    require_known,
    require_soft,
)

NAME = "robust-logits"
OPEN = "logits left the party without noise"
PROX = "my-prox"
ARGUMENTS = ["-q", "-p", "no:cacheprovider", "tests/contract", "-k", f"{NAME} or {PROX}"]
RECIPE = Recipe(loss="cross-entropy", link="softmax")


@dataclass(frozen=True, kw_only=True)
class RobustLogitsOptions(Options):
    """Options of `RobustLogits`."""

    trim_fraction: float = option(0.25, "parties cut off each side", least=0, below=0.5)


def release_plan(trainer: Any = None) -> ReleasePlan:
    """Return what a round releases, the same on both sides."""
    price = Price(record=open_charges(OPEN), unprotected=(OPEN,))
    return ReleasePlan(
        name=NAME, trainer=trainer, models=False, reason=OPEN, price=lambda: price
    )


class RobustLogits(KnowledgeStrategy[FloatArray]):
    """One round of logits, combined by a trimmed mean."""

    name: ClassVar[str] = NAME
    options_type = RobustLogitsOptions
    takes = ("public", "num_classes", "learner_fn", "learner_name", "options")
    identified_by = ("public", "num_classes", "learner_fn", "model_name", "options")
    final_learner_needs = (SoftLearner,)
    reply_kind = "logits"
    last_round = 1

    def __init__(
        self,
        *,
        public: Any,
        num_classes: int,
        learner_fn: Any,
        learner_name: str = "learner",
        options: RobustLogitsOptions | None = None,
        **federation: Any,
    ) -> None:
        super().__init__(**federation)
        self.public, self.num_classes, self.learner_fn = public, num_classes, learner_fn
        self.model_name, self.options = learner_name, options or RobustLogitsOptions()
        self.state = State(ledger=self.new_ledger(self.plan))

    @property
    def plan(self) -> ReleasePlan:
        return release_plan()

    def party_config(self) -> dict[str, Any]:
        own = {keys.NUM_CLASSES: self.num_classes, keys.PUBLIC_HASH: content_hash(self.public)}
        return {**self.options.to_config(), **own}

    def check(self, knowledge: Knowledge) -> FloatArray:
        logits, shape = knowledge.arrays.get("logits"), (len(self.public), self.num_classes)
        if logits is None or logits.shape != shape or not np.isfinite(logits).all():
            raise KnowledgeMismatch(f"logits: they must be finite, of shape {shape}.")
        return logits

    def finish(self) -> tuple[ArrayRecord | None, dict[str, float]]:
        mean = RobustConsensus("trimmed-mean", trim_fraction=self.options.trim_fraction)
        for reply in self.replies:
            mean.add(reply.knowledge)
        targets, rng = link_scores(mean.result(), RECIPE), derive_rng(self.seed, "final")
        student = require_soft("RobustLogits", self.learner_fn())
        model = student.distill(self.public, targets, rng=rng, recipe=RECIPE)
        return self.keep_model(model), {}


class RobustLogitsParty(PartyRole):
    """A model of its own, and its logits on the public rows."""

    def plan(self, party: Party, _: ConfigRecord) -> ReleasePlan:
        return release_plan(party.learner_fn)

    def train(
        self, party: Party, _: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, dict[str, float]]:
        check_public_data(party, config)
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        _, _, metrics = charge_plan(party, self.plan(party, config), state)
        rng = party.rng(read_seed(config), "model")
        model = party.learner_fn().fit(party.x, party.y, rng=rng)
        logits = finite_logits(party.owner, model, party.public, promised=False)
        return Knowledge("logits", {"logits": logits.astype(np.float32)}), metrics


def register() -> None:
    REGISTRY[NAME] = Algorithm(RobustLogits, RobustLogitsParty())
    # FedProx without a line of server code: Flower's own class does it all.
    REGISTRY[PROX] = Algorithm(flower_strategy(FedProx, PROX), WeightsParty())


def test_new_strategies_keep_the_whole_contract() -> None:
    """The suite over the registry runs them end to end, without a word about them."""
    code = "from tests.strategies.test_new_strategy import register; register(); "
    code += "import pytest, sys; "
    done = subprocess.run(
        [sys.executable, "-c", code + f"sys.exit(pytest.main({ARGUMENTS}))"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:]
    assert "failed" not in done.stdout
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 60
    assert sum(map(code_lines, (RobustLogitsOptions, RobustLogits, RobustLogitsParty))) <= 60


def code_lines(kind: type) -> int:
    lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
    return sum(bool(line) and not line.startswith(('"""', "#")) for line in lines)
