from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from clients import client_app
from fl_strategies import REGISTRY, Knowledge, PartyState
from fl_strategies._compat import records_from_bytes, records_to_bytes
from fl_strategies._util import content_hash
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.party.role import ArrayField, ArraysField, Field, KnowledgeField, ScalarField
from fl_strategies.privacy.events import LaplaceEvent
from fl_strategies.wire.knowledge import decode_arrays
from simulations.runtime.local import InMemoryGrid
from tests.toys import common_options, load_toy_party, toy_party

PARTY = toy_party(3)


def with_value(array: np.ndarray, position: Any, value: float) -> np.ndarray:
    changed = array.copy()
    changed[position] = value
    return changed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"public": with_value(PARTY.public, (9, 1), np.nan)}, "public must be finite"),
        ({"public_y": np.full(60, 3)}, "public_y must be class indices below 3, or names"),
        ({"public_y": np.arange(60) % 4}, "public_y must be between 0 and 2, .* got 15 others"),
        ({"x": PARTY.x[:, 0]}, "x must be an array of rows"),
        ({"x": PARTY.x[:, :1]}, r"x must be rows of shape \(2,\) like the public data"),
        ({"y": PARTY.y + 0.5}, "y must be class indices below 3"),
        ({"y": np.stack([PARTY.y] * 2, axis=1)}, "y must be a flat array of class indices"),
        ({"y": PARTY.y[:-1]}, "y must be 40 labels, one per row, got 39"),
        ({"y_test": None}, "x_test and y_test must be given together"),
        ({"x_test": PARTY.x[:, :1], "y_test": PARTY.y}, "x_test must be rows of shape"),
    ],
)
def test_bad_data_and_numbers_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidData, match=f"Party 3: {sentence}"):
        replace(PARTY, **change)
    with pytest.raises(InvalidParameter, match="num_classes must be at least 2, got 1"):
        replace(PARTY, num_classes=1)
    with pytest.raises(InvalidParameter, match="partition_id must be at least 0, got -1"):
        replace(PARTY, partition_id=-1)


@pytest.mark.parametrize(
    ("value", "read"), [(np.nan, "median"), (np.inf, "bound"), (-1e300, "-bound")]
)
def test_an_invalid_value_becomes_a_public_default(
    value: float, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the party's own log it is counted, and not quoted; no error leaves."""
    party = replace(PARTY, x=with_value(PARTY.x, (4, 1), value))
    bound = 10 * np.abs(PARTY.public).max()
    defaults = {"median": np.median(PARTY.public[:, 1]), "bound": bound, "-bound": -bound}

    np.testing.assert_array_equal(party.x, with_value(PARTY.x, (4, 1), defaults[read]))
    counted = "1 values of x are no numbers; the public median stands in"
    assert (counted if read == "median" else "are cut to it") in caplog.text
    assert "1e+300" not in caplog.text


@pytest.mark.parametrize("label", [3, -1])
def test_an_unknown_label_becomes_the_commonest_public_class(
    label: int, caplog: pytest.LogCaptureFixture
) -> None:
    y = with_value(PARTY.y, 5, label)
    public_y = np.minimum(np.arange(60) % 4, 2)

    assert replace(PARTY, y=y).y.tolist() == with_value(PARTY.y, 5, 0).tolist()
    labelled = replace(PARTY, y=y, public_y=public_y)
    assert labelled.y.tolist() == with_value(PARTY.y, 5, 2).tolist()
    assert "1 labels of y are no class; class 2 stands in for each" in caplog.text


def test_content_hash_sees_type_shape_order_and_values_but_no_memory_layout() -> None:
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    others = [
        base.astype(np.float64),
        base.reshape(3, 2),
        base[::-1],
        base + np.float32(1e-6) * (base == 0),
    ]

    assert len({content_hash(a) for a in [base, *others]}) == 5
    assert content_hash(base) == content_hash(np.asfortranarray(base))
    assert content_hash(base) == content_hash(base.astype(">f4"))


EVENT = LaplaceEvent(unit="example", relation="replace-one", scale=4.0, l1_sensitivity=2.0)


class MyState(PartyState):
    """What the parties of a new strategy might keep."""

    model = KnowledgeField("my-model", "model")
    momentum = ArraysField("my-momentum")
    rows = ArrayField("my-rows", "rows")
    steps = ScalarField("mine", "steps", 0)
    terms = ScalarField("mine", "terms", "")


def filled() -> MyState:
    state = MyState()
    state.model = Knowledge("model", {"w": np.ones(2)}, {"learner": "a"})
    state.momentum = {"w": np.arange(3.0), "b": np.zeros(1)}
    state.rows, state.steps, state.terms = np.array([4, 2]), 7, "mine"
    state.charge([(EVENT, 2)], 1e-5)
    return state


def test_a_new_state_holds_nothing() -> None:
    state = MyState()

    assert (state.model, state.momentum, state.rows) == (None, None, None)
    assert (state.steps, state.terms, state.ledger(1e-5).entries) == (0, "", ())
    assert not state.records


def test_what_is_kept_is_the_same_after_a_restart() -> None:
    """Through the very bytes that a run on disk has."""
    state = MyState(records_from_bytes(records_to_bytes(filled().records)))

    assert state.model is not None
    assert (state.model.kind, state.model.meta) == ("model", {"learner": "a"})
    np.testing.assert_array_equal(state.model.arrays["w"], [1.0, 1.0])
    momentum = {name: array.tolist() for name, array in (state.momentum or {}).items()}
    assert momentum == {"w": [0.0, 1.0, 2.0], "b": [0.0]}
    assert state.rows is not None
    assert (state.rows.tolist(), state.steps, state.terms) == ([4, 2], 7, "mine")
    assert dict(state.ledger(1e-5).entries) == {EVENT: 2}


def test_a_field_holds_its_last_value_and_changes_no_other() -> None:
    state = filled()
    state.rows, state.momentum, state.steps = None, {"v": np.zeros(1)}, 8
    state.model = Knowledge("model", {"w": np.zeros(1)})

    assert state.rows is None
    assert state.model is not None
    assert (state.model.arrays["w"].tolist(), state.model.meta) == ([0.0], {})
    assert state.momentum is not None
    assert [*state.momentum] == ["v"]
    assert (state.steps, state.terms) == (8, "mine")
    assert PartyState(state.records).ledger(1e-5).num_releases == 2


@pytest.mark.parametrize("wrong", [ArrayRecord(), ConfigRecord({"steps": "7"}), MetricRecord()])
def test_what_is_of_another_type_counts_as_none(wrong: Any) -> None:
    """A party then starts anew where it cannot continue."""
    names = ["mine", "my-rows", "my-model", "my-momentum", "my-model-meta"]
    state = MyState(RecordDict(dict.fromkeys(names, wrong)))

    assert (state.model, state.rows, state.steps, state.terms) == (None, None, 0, "")
    assert not state.momentum


def test_knowledge_of_another_kind_is_refused() -> None:
    state = filled()
    state.model = Knowledge("models", {})

    with pytest.raises(KnowledgeMismatch, match="kind must be 'model', got 'models'"):
        _ = state.model


@pytest.mark.parametrize(
    "wrong", [ArrayRecord(), MetricRecord(), ConfigRecord(), ConfigRecord({"ledger": "{}"})]
)
def test_a_damaged_ledger_does_not_count_as_nothing(wrong: Any) -> None:
    """What has been spent is not known then, so nothing more may leave."""
    state = filled()
    state.records["privacy-spent"] = wrong

    with pytest.raises((KeyError, ValueError)):
        state.charge([(EVENT, 1)], 1e-5)


def declared(kind: type[PartyState]) -> set[str]:
    fields = [f for base in kind.__mro__ for f in vars(base).values() if isinstance(f, Field)]
    metas = [f"{field.record}-meta" for field in fields if isinstance(field, KnowledgeField)]
    own = {field.record for field in fields} | {*metas, "privacy-spent"}
    return own.union(*map(declared, kind.__subclasses__()))


@pytest.mark.parametrize("name", REGISTRY)
def test_parties_keep_what_is_declared_and_nothing_else(name: str) -> None:
    """Texts, numbers and plain arrays, in records that a `PartyState` names."""
    strategy: Any = REGISTRY[name].strategy(**common_options(3))  # type: ignore[arg-type]
    grid = InMemoryGrid(client_app(load_toy_party), 3)
    strategy.start(grid, ArrayRecord(), num_rounds=2)

    for node in grid._nodes.values():
        records = records_from_bytes(node.state)
        assert records
        assert set(records) <= declared(PartyState)
        for record in records.values():
            if isinstance(record, ArrayRecord):
                decode_arrays(record, 10**6)
            else:
                assert isinstance(record, ConfigRecord)
                assert all(isinstance(v, str | int | float) for v in record.values())
