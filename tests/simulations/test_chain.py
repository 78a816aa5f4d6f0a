"""A second strategy by the setting `then`."""

from typing import Any

import pytest

from fl_strategies import Chain
from fl_strategies.errors import InvalidParameter
from simulations.config import Settings, parse_assignments
from simulations.federation import load_federation
from simulations.runtime.local import run_once

MU = "flower-fedprox.proximal-mu"
SMALL: dict[str, Any] = {
    "strategy": "fedkt",
    "then": "flower:FedProx",
    "then_rounds": 2,
    "num_parties": 3,
    "train_rows": 300,
    "epochs": 2,
    "num_workers": 1,
    "solo": False,
    "pooled": False,
    MU: 0.25,
}


def test_it_is_a_chain_of_both_with_their_own_settings() -> None:
    """The first has short names, the second its section, and all models are of one kind."""
    settings = Settings.of(**SMALL, corrected=False)

    strategy = load_federation(settings).strategy()

    assert isinstance(strategy, Chain)
    first, second = strategy.links
    assert first.options.corrected is False  # type: ignore[attr-defined]
    assert second.options.proximal_mu == 0.25  # type: ignore[attr-defined]
    assert strategy.num_rounds == (1, 2)
    assert settings.num_rounds == 3
    assert load_federation(settings).learner_names == ("mlp",)
    assert strategy.name == "fedkt+flower:FedProx"


def test_a_run_reports_both() -> None:
    """Three rounds, one ledger, and the name of either strategy."""
    report = run_once(Settings.of(**SMALL))

    assert len(report["rounds"]) == 3
    assert report["settings"]["then"] == "flower:FedProx"
    assert report["settings"][MU] == 0.25
    assert len(report["ledger"]["entries"]) >= 2


@pytest.mark.parametrize(
    "first", ["fedkd", "fedhistogram", "fedregression", "fedmoments", "fedmd"]
)
def test_other_firsts_are_made(first: str) -> None:
    """Whatever model they usually end in, here it is one whose weights can be averaged."""
    given = {**SMALL, "strategy": first}

    strategy = load_federation(Settings.of(**given)).strategy()

    assert isinstance(strategy, Chain)


def test_settings_survive_a_run_configuration() -> None:
    """What the server tells its parties gives the same settings again."""
    settings = Settings.of(**SMALL)

    again = Settings.from_run_config(settings.to_run_config())

    assert again == settings
    assert again.but(seed=1).then_options == settings.then_options
    assert parse_assignments([f"{MU}=0.5", "then-rounds=7"]) == {MU: 0.5, "then-rounds": 7}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"then_rounds": 3}, "then must be given"),
        ({"then": "fedprox"}, "strategy must be one of"),
        ({**SMALL, "learner": "random-forest"}, "learner must be one of"),
    ],
)
def test_what_cannot_be_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    """Before anything is trained."""
    with pytest.raises(InvalidParameter, match=sentence):
        load_federation(Settings.of(**given)).strategy()
