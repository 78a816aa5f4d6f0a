"""A server asks a party for more than its owner allows; nothing about a record may leave."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from clients.app import NO_BUDGET, role_of
from clients.tabular.kernel import RidgeLearner
from fl_strategies import REGISTRY
from fl_strategies.errors import InvalidParameter, PrivacyBudgetExceeded
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.wire import keys
from simulations.config import Value
from simulations.deploy.__main__ import main
from simulations.deploy.checking import ROLES, questions
from simulations.deploy.client_app import FORMS, app, build_party
from simulations.deploy.data import write_labelled
from simulations.runtime.flower import to_toml
from tests.kept import journal_of, question

NUM_RECORDS, NUM_PUBLIC = 30, 20
CLASSES = ("cat", "dog")
LEARNERS = """
from pathlib import Path
from sklearn.tree import DecisionTreeClassifier
from clients import SklearnLearner

class Watched(SklearnLearner):
    def fit(self, x, y, *, rng):
        Path(__file__).with_suffix(".touched").touch()
        return super().fit(x, y, rng=rng)

def make(*, row_shape, num_classes):
    return Watched(DecisionTreeClassifier(), num_classes=num_classes)
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Value]:
    """Return a node-config that says nothing about a policy, of a party that is watched."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(NUM_RECORDS, 2)), rng.integers(0, 2, NUM_RECORDS)
    write_labelled(tmp_path / "mine.npz", x, y, CLASSES)
    write_labelled(tmp_path / "public.npz", x[:NUM_PUBLIC] + 1, None, CLASSES)
    (tmp_path / "watched.py").write_text(LEARNERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(importlib.import_module("sys").modules, "watched", raising=False)
    return {
        "partition-id": 0,
        "data-file": str(tmp_path / "mine.npz"),
        "public-file": str(tmp_path / "public.npz"),
        "classes": ",".join(CLASSES),
        "learner": "watched:make",
    }


def touched(node: Mapping[str, Value]) -> bool:
    """Return whether the party has trained on its records, and forget it."""
    mark = Path(str(node["data-file"])).with_name("watched.touched")
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def asked_of(node: Mapping[str, Value], strategy: str, **asked: Any) -> dict[str, Any]:
    """Return what a server of these settings sends to a party."""
    party = build_party(node, run="7")
    given = {
        "public": party.public,
        "num_classes": 2,
        "num_parties": 3,
        "learner_fn": lambda: RidgeLearner(num_classes=2),
        "learner_name": party.learner_name,
        **asked,
    }
    made: Any = REGISTRY[strategy].strategy
    config = made.from_settings(**given).party_config()
    return {**config, keys.STRATEGY: strategy, keys.SEED: 0, keys.SERVER_ROUND: 1}


def ask(
    node: Mapping[str, Value], config: Mapping[str, Any], *, kind: str = "train"
) -> Message:
    """Send a message to the deployed party."""
    return app(question(config, kind), Context(7, 1, dict(node), RecordDict(), {}))


def refusal(node: Mapping[str, Value], config: Mapping[str, Any]) -> str:
    """Return why a party refuses; it must not have trained."""
    reply = ask(node, config)
    assert reply.has_error(), "the party has answered"
    assert not touched(node), "the party has trained before it refused"
    return str(reply.error.reason)


OPEN: dict[str, Value] = {"allow-unprotected": True, "allow-models": True}
L2 = {"privacy_level": "L2", "gamma": 0.5, "num_teachers": 5, "num_queries": 5}
NFDP = {"release": "nfdp", "num_samples": 3, "with_replacement": False}


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        ("fedkt", {}),
        ("fedkt", {"privacy_level": "L1", "gamma": 1.0}),
        ("fedkd", {}),
        ("fedkd", {"weights": "noisy-evidence"}),
        ("fedmd", {}),
    ],
)
def test_a_server_that_asks_for_answers_without_noise_gets_none(
    node: dict[str, Value], strategy: str, asked: dict[str, Any]
) -> None:
    """By default a deployed party protects its records itself, whatever it is asked for."""
    config = asked_of(node, strategy, **asked)

    reason = refusal(node, config)

    assert "what leaves must be protected, by its policy (allow-unprotected)" in reason
    reply = ask({**node, "allow-unprotected": True}, config)
    assert not reply.has_error(), reply.error.reason


def test_a_server_that_asks_for_models_instead_of_votes_gets_none(
    node: dict[str, Value],
) -> None:
    """Models say far more than labels: their owner must have named them."""
    config = asked_of(node, "fedkt", **L2, exchange="models")

    assert "answers about public rows, by its policy (allow-models)" in refusal(node, config)
    assert not ask({**node, "allow-models": True}, config).has_error()


@pytest.mark.parametrize(
    "strategy",
    [
        *("akd", "avgkd", "ekd", "fedavg", "feddf"),
        *("fedgen", "fens", "pfnm", "pkd", "scaffold"),
    ],
)
def test_strategies_that_send_models_need_leave(node: dict[str, Value], strategy: str) -> None:
    """What a strategy does not say about itself counts as the worst."""
    config = {keys.STRATEGY: strategy, keys.SEED: 0, keys.SERVER_ROUND: 1}

    assert "(allow-models)" in refusal({**node, "allow-unprotected": True}, config)


def test_a_server_that_knows_the_noise_gets_nothing(node: dict[str, Value]) -> None:
    """Seeded noise can be subtracted by everybody who knows the seed."""
    config = asked_of(node, "fedkt", **L2, seeded_noise=True)

    assert "drawn in secret" in refusal({**node, "allow-unprotected": True}, config)
    assert "drawn in secret" in refusal(node, config)


def test_a_server_that_turns_the_noise_off_by_its_strength_gets_nothing(
    node: dict[str, Value],
) -> None:
    """Gamma 1e9 is a promise in name only: its epsilon is above the policy's for a run."""
    config = asked_of(node, "fedkt", **{**L2, "gamma": 1e9})

    reply = ask(node, config)

    assert reply.has_error()
    assert reply.error.reason == NO_BUDGET
    assert not ask(node, asked_of(node, "fedkt", **L2)).has_error()


@pytest.mark.parametrize("keeps", [False, True], ids=["memory", "journal"])
def test_a_run_of_many_rounds_cannot_spend_round_by_round(
    node: dict[str, Value], tmp_path: Path, keeps: bool
) -> None:
    """What rounds of one run cost adds up, with a journal and without."""
    if keeps:
        node |= {"state-dir": str(tmp_path / "state")}
    noise = {"release": "ldp", "payload": "softmax", "sigma": 4.0, "accept_noise": True}
    node |= {"max-run-epsilon": 12.0, "allow-drowned-noise": True}
    config, state = asked_of(node, "fedmd", **noise), RecordDict()
    refused = []
    for number in range(1, 6):
        message = question({**config, keys.SERVER_ROUND: number})
        refused.append(app(message, Context(7, 1, dict(node), state, {})).has_error())

    assert not refused[0]
    assert refused[-1]


def test_a_sample_of_all_records_is_no_sample(node: dict[str, Value]) -> None:
    """With k = n every record is used in the clear; the owner says how likely that may be."""
    everything = asked_of(node, "fedmd", **{**NFDP, "num_samples": NUM_RECORDS})
    tenth = asked_of(node, "fedmd", **NFDP)

    assert "the chance to be in the sample must be at most 0" in refusal(node, tenth)
    node["sample-delta"] = 0.1
    assert "must be at most 0.1, by its policy (sample-delta), got 1" in refusal(
        node, everything
    )
    assert not ask(node, tenth).has_error()


@pytest.mark.parametrize(
    ("strategy", "change", "what"),
    [
        ("fedkt", {"num-teachers": 30, "num-splits": 1000}, "fits of a request"),
        ("fedkd", {"num-predictions": 2**20}, "predictions of a request"),
        ("fedmd", {"epochs-initial": 9999, "epochs-revisit": 9999}, "epochs of a request"),
        ("scaffold", {"local-epochs": 9999}, "epochs of a request"),
        ("fens", {"stage": "aggregator", "aggregator-epochs": 9999}, "epochs of a request"),
        ("fedgen", {"num-generated": 100_000, "local-epochs": 500}, "predictions of a request"),
    ],
)
def test_a_server_cannot_keep_a_party_busy_for_ever(
    node: dict[str, Value], strategy: str, change: dict[str, Any], what: str
) -> None:
    """Work has a limit, also for a party that allows everything else, and in an evaluation.

    Passes over records, over held-back ones and over generated features count alike.
    """
    node |= {**OPEN, "max-epochs": 5000, "max-predictions": 10**7}
    config = {keys.STRATEGY: strategy, keys.SEED: 0, keys.SERVER_ROUND: 1}
    if strategy in ("fedkt", "fedkd", "fedmd"):
        config = asked_of(node, strategy)

    assert f"{what} must be at most" in refusal(node, {**config, **change})
    late = ask(node, {**config, **change}, kind="evaluate")
    assert f"{what} must be at most" in str(late.error.reason)


def test_no_party_allows_work_without_end(node: dict[str, Value]) -> None:
    """2**20 passes over the records were once accepted."""
    node |= {**OPEN, "max-predictions": 10**12}
    many = {**asked_of(node, "fedkd"), "num-predictions": 10**7}
    passes = {keys.STRATEGY: "fedavg", keys.SEED: 0, "local-epochs": 2**20}

    assert "num_predictions must be from 1 to 1048576" in refusal(node, many)
    assert "local_epochs must be from 1 to 10000" in refusal(node, passes)
    assert "at most 40" in refusal({**node, "max-epochs": 40}, {**passes, "local-epochs": 50})


def test_a_party_takes_part_in_what_it_named_and_nothing_else(node: dict[str, Value]) -> None:
    """A strategy may be named alone, or with its level or release."""
    node |= {"strategies": "fedkt L2, fedkd", "allow-unprotected": True}

    rule = "the strategy must be one that its policy allows (fedkt L2, fedkd), got"
    assert f"{rule} fedkt L0" in refusal(node, asked_of(node, "fedkt"))
    assert f"{rule} fedmd none" in refusal(node, asked_of(node, "fedmd"))
    assert not ask(node, asked_of(node, "fedkd")).has_error()
    assert not ask(node, asked_of(node, "fedkt", **L2)).has_error()


def test_accuracy_on_held_out_rows_is_a_release_as_well(node: dict[str, Value]) -> None:
    """It leaves a party whose policy is open, and only where nothing is promised."""
    node["test-file"] = node["data-file"]
    node |= {"sample-delta": 0.2}
    told = []
    for is_open, release in ((False, NFDP), (True, NFDP), (True, {})):
        config = asked_of(node, "fedmd", **release)
        reply = ask({**node, "allow-unprotected": is_open}, config)
        told.append(reply.content.metric_records[keys.METRICS][keys.LOCAL_FIGURE])

    assert np.isnan(told).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            {"allow-unprotected": True, "max-run-epsilon": 3.0},
            "max-run-epsilon must be omitted",
        ),
        ({"strategies": "fedkt L3"}, "strategies must be among"),
        ({"strategies": "fedktt"}, "strategies must be among"),
        ({"allow-unprotectd": True}, "keys must be among"),
        ({"allow-models": "yes"}, "allow-models must be true or false"),
        ({"max-run-epsilon": 0.0}, "max_run_epsilon must be greater than 0"),
        ({"sample-delta": 1.0}, "sample-delta must be at least 0 and below 1"),
        ({"max-epochs": 0}, "max_epochs must be at least 1"),
    ],
)
def test_a_policy_that_says_nothing_sensible_is_refused(
    node: dict[str, Value], change: dict[str, Value], rule: str
) -> None:
    """A mistake in the name of a rule must not open a party."""
    with pytest.raises(InvalidParameter, match=rule):
        build_party({**node, **change}, run="1")


def test_the_owner_can_read_what_is_allowed(
    node: dict[str, Value], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    node |= {"allow-models": True, "sample-delta": 0.2}
    file.write_text(to_toml(node).replace(" ", "\n"))

    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "allowed: cronus nfdp, cronus ldp, fedhistogram L2, fedkt L2, fedmd nfdp" in said
    assert "limits: epsilon of a run at most 10; samples" in said
    assert "also models" in said


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max-epsilon": 4.0},
        OPEN,
        {"strategies": "fedkt"},
        {"strategies": "fedkt L2,fedavg"},
    ],
)
def test_the_owner_reads_what_the_party_then_answers(
    node: dict[str, Value],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Value],
) -> None:
    """FedKT at a level is listed as allowed if, and only if, it is not refused when asked."""
    file = tmp_path / "node.toml"
    node |= {"state-dir": str(tmp_path / "state"), **change}
    file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in node.items()))

    assert main(["check", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "allowed: " in line]
    listed = line.removeprefix("allowed: ").split(", ")
    levels: dict[str, dict[str, Any]] = {
        "L0": {},
        "L1": {**L2, "privacy_level": "L1"},
        "L2": L2,
    }
    for level, asked in levels.items():
        reply = ask(node, asked_of(node, "fedkt", accept_noise=True, **asked))
        refused = reply.has_error() and "must be" in str(reply.error.reason)
        drowned = refused and "allow-drowned-noise" in str(reply.error.reason)
        assert (f"fedkt {level}" in listed) == (not refused or drowned), reply


def test_every_form_that_a_policy_may_name_is_listed(node: dict[str, Value]) -> None:
    party = build_party(node, run="1")
    asked = dict(questions(party))

    families = {form.partition(" ")[0] for form in asked if " " in form}
    assert {*FORMS} - families == {*asked}
    for form, config in asked.items():
        assert ROLES[role_of(config, ROLES)].plan(party, config).name == form


# A budget that is spent


def test_a_party_whose_budget_is_spent_does_not_train(
    node: dict[str, Value], tmp_path: Path
) -> None:
    """Nothing can be paid any more, so no server gets as much as the time of a training."""
    node |= {"state-dir": str(tmp_path / "state"), "max-epsilon": 2.0}
    party = build_party(node, run="7")
    config = asked_of(node, "fedkt", **L2)
    owner = journal_of(party, tmp_path / "state", max_epsilon=None)
    owner.charge(
        [(NonPrivateEvent(unit="example", reason="published"), 1)], run="-", purpose="-"
    )
    assert party.journal is not None
    with pytest.raises(PrivacyBudgetExceeded, match="must be below 2, the max-epsilon"):
        party.journal.require_budget()

    reply = ask(node, config)

    assert reply.has_error()
    assert not touched(node)


def test_a_budgeted_party_does_not_train_for_what_it_can_never_pay(
    node: dict[str, Value], tmp_path: Path
) -> None:
    """What leaves without noise is beyond every budget, also where the policy is open."""
    node |= {"state-dir": str(tmp_path / "state"), "max-epsilon": 2.0}
    node |= {"allow-unprotected": True}

    assert "what leaves must be protected, by its budget" in refusal(
        node, asked_of(node, "fedkd")
    )
