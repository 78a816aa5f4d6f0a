"""Sending labels and sending models are the same algorithm, for real models of all kinds."""

import pytest

from simulations.config import Settings
from simulations.federation import load_federation
from simulations.runtime.client_app import app
from simulations.runtime.local import run_local


@pytest.mark.parametrize("final", ["random-forest", "xgboost", "logistic-regression", "mlp"])
def test_votes_and_models_end_in_the_same_bits(final: str) -> None:
    """Forest, boosting, regression and network: the final scores are equal to the bit."""
    scores = []
    for exchange in ("votes", "models"):
        settings = Settings.of(
            strategy="fedkt",
            num_parties=4,
            num_teachers=2,
            num_trees=8,
            boosting_rounds=8,
            epochs=3,
            exchange=exchange,
            final_learner=final,
            seed=2,
        )
        federation = load_federation(settings)
        strategy = federation.strategy()
        run_local(strategy, app, 4, run_config=settings.to_run_config())
        assert not strategy.rejected_
        scores.append(strategy.model_.logits(federation.dataset.x_test).tobytes())

    assert scores[0] == scores[1]
