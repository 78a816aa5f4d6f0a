"""Figures and names that no honest party would send."""

import json
import logging
import math

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

from clients import client_app
from fl_strategies import REGISTRY
from fl_strategies.server.replies import LONGEST_NAME, clean_metrics
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.toys import common_options, load_toy_party, toy_fedkt

NUM_PARTIES = 4


class Boasting(InMemoryGrid):
    """The first party says of itself what a test chooses."""

    def __init__(self, metrics: dict[str, float], learner: str | None = None) -> None:
        super().__init__(client_app(load_toy_party), NUM_PARTIES)
        self.metrics, self.learner = metrics, learner

    def pull_messages(self, message_ids: list[str]) -> list[Message]:  # type: ignore[override]
        replies = super().pull_messages(message_ids)
        for content in [r.content for r in replies if r.metadata.src_node_id == 1000]:
            own = content.metric_records[keys.METRICS]
            content[keys.METRICS] = MetricRecord({**own, **self.metrics})
            if self.learner is not None:
                content.config_records[keys.META][keys.LEARNER] = self.learner
        return replies


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize(
    ("metric", "value"),
    [
        *((keys.NUM_EXAMPLES, value) for value in (math.inf, 1e308, -5, 2**60)),
        *((keys.ACCURACY, value) for value in (1e308, -math.inf, 1.5, -0.1)),
    ],
)
def test_an_absurd_figure_of_one_party_spoils_no_total(
    name: str, metric: str, value: float
) -> None:
    """It is dropped, as if the party had not told it; the others' figures stand."""
    strategy = REGISTRY[name].strategy(**common_options(NUM_PARTIES))

    result = strategy.start(Boasting({metric: value}), ArrayRecord(), num_rounds=1)

    assert not strategy.rejected_
    for record in (result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]):
        figure = record.get(metric, 0.0)
        assert isinstance(figure, int | float)
        assert figure <= (1 if metric == keys.ACCURACY else 4 * 200)
        assert figure >= 0
    reports = strategy.parties_[0]
    assert metric not in reports.train
    assert metric not in reports.evaluate


def test_not_a_number_means_not_told() -> None:
    """A party without test rows says NaN, which is honest; so is an infinite epsilon."""
    told = {keys.ACCURACY: math.nan, keys.EPSILON_EXAMPLE: math.inf, "own-loss": -3.5}

    assert repr(clean_metrics(told)) == repr(told)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (keys.EPSILON_EXAMPLE, -1.0),
        (keys.EPSILON_PARTY, -math.inf),
        (keys.DELTA_EXAMPLE, 7.0),
        (keys.NUM_RELEASES, 10**400),
        (keys.MEAN_SQUARED_ERROR, -1.0),
        (keys.AUC, 2.0),
        *(("anything", value) for value in (math.inf, 1e300)),
        *((name, 1.0) for name in ("two\nlines", "\x1b[2J", "x" * 65, "")),
    ],
)
def test_figures_outside_of_what_they_mean_are_dropped(metric: str, value: float) -> None:
    """A negative epsilon would promise more than anybody can keep."""
    assert clean_metrics({metric: value, keys.ACCURACY: 0.5}) == {keys.ACCURACY: 0.5}


def test_a_negative_epsilon_counts_as_no_promise() -> None:
    """What is dropped is not told, and who tells no epsilon is unprotected."""
    strategy = toy_fedkt()
    liar = Boasting({keys.EPSILON_EXAMPLE: -4.0, keys.EPSILON_PARTY: -4.0})

    result = strategy.start(liar, ArrayRecord(), num_rounds=1)

    assert result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE] == math.inf


SCREEN = "forest\x1b[2J\x07\r\n" + "a\u202eb" + "\u0000" + "x" * 10_000


def test_a_learners_name_cannot_clear_the_screen(caplog: pytest.LogCaptureFixture) -> None:
    """Names are one short line of letters before they are printed or stored."""
    strategy = toy_fedkt()
    with caplog.at_level(logging.DEBUG, logger="flwr.fl_strategies"):
        strategy.start(Boasting({}, SCREEN), ArrayRecord(), num_rounds=1)

    name = strategy.parties_[0].learner_name
    assert name.startswith("forest [2J a b xxx")
    assert name.isprintable()
    assert len(name) <= LONGEST_NAME
    assert not any(c in caplog.text for c in "\x1b\x07\u202e")
    assert json.dumps(name)


@pytest.mark.parametrize("name", ["avgkd", "akd"])
def test_a_relayed_models_name_is_printable_too(name: str) -> None:
    """A server names in its errors what agents call their models."""
    strategy = REGISTRY[name].strategy(**common_options(NUM_PARTIES))

    strategy.start(Boasting({}, "forest\x1b[2J"), ArrayRecord(), num_rounds=1)

    assert "must be a name" in strategy.rejected_[1000]
    assert all(reason.isprintable() for reason in strategy.rejected_.values())
