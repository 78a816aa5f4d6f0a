"""Nodes that say they are somebody else, or somebody new in every round."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

from clients import client_app
from fl_strategies import REGISTRY, KnowledgeStrategy
from fl_strategies.errors import InvalidData, InvalidParameter, NotEnoughParties
from fl_strategies.wire import keys
from simulations.deploy.server_app import read_members
from simulations.runtime.local import InMemoryGrid
from tests.kept import Killed
from tests.toys import common_options, load_toy_party

NUM_PARTIES = 4
FIRST, LAST = 1000, 1003
Claim = Callable[[int, int], int]


class Masked(InMemoryGrid):
    """A grid in which a test chooses who is there and what every node calls itself."""

    def __init__(self, claim: Claim, num_nodes: int = NUM_PARTIES) -> None:
        super().__init__(client_app(load_toy_party), num_nodes)
        self.claim, self.away = claim, set[int]()
        self.asked: list[list[int]] = []
        self._rounds: dict[str, int] = {}

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.asked.append(sorted(message.metadata.dst_node_id for message in sent))
        ids = super().push_messages(sent)
        for number, message in zip(ids, sent, strict=True):
            config = message.content.config_records[keys.CONFIG]
            self._rounds[number] = int(str(config[keys.SERVER_ROUND]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        for reply in replies:
            number = self._rounds[reply.metadata.reply_to_message_id]
            claimed = self.claim(number, reply.metadata.src_node_id)
            reply.content.config_records[keys.META][keys.PARTITION_ID] = claimed
        return replies


def honest(_: int, node: int) -> int:
    return node - FIRST


def build(name: str, **changes: Any) -> KnowledgeStrategy[Any]:
    return REGISTRY[name].strategy.from_settings(**{**common_options(NUM_PARTIES), **changes})


def rejected_by_round(
    strategy: KnowledgeStrategy[Any], grid: InMemoryGrid, rounds: int
) -> list[set[int]]:
    """Run some rounds one after the other and return who was excluded from each."""
    found = []
    for _ in range(rounds):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        found.append(set(strategy.rejected_))
    return found


def rounds_of(name: str) -> int:
    return 1 if name in {"fedkt", "fedkd"} else 3


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("liar", [FIRST, LAST])
def test_a_node_that_claims_anothers_number_from_the_start_displaces_nobody(
    name: str, liar: int
) -> None:
    """One node, one voice: whoever it says it is, the honest party takes part throughout."""
    grid = Masked(lambda _, node: 2 if node == liar else node - FIRST)
    strategy = build(name)

    excluded = rejected_by_round(strategy, grid, rounds_of(name))

    assert excluded == [set()] * rounds_of(name)
    assert len(strategy.parties_) == NUM_PARTIES
    # The node that Flower has known by the smaller number keeps the name.
    assert sorted(strategy.parties_)[0] == -1


def test_samples_of_two_nodes_with_one_name_are_never_counted_too_low() -> None:
    """They may be of the same records, so the chance to be in either is what is stated."""
    nfdp = {"release": "nfdp", "num_samples": 10}
    alone, doubled = build("fedmd", **nfdp), build("fedmd", **nfdp)

    rejected_by_round(alone, Masked(honest), 1)
    excluded = rejected_by_round(doubled, Masked(lambda _, node: min(node - FIRST, 2)), 1)

    assert excluded == [set()]
    assert doubled.ledger_.delta > alone.ledger_.delta


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"fedkt", "fedkd"}))
def test_a_node_that_claims_anothers_number_later_excludes_itself(name: str) -> None:
    """From the second round on a node is who it was, or it is excluded."""
    grid = Masked(lambda number, node: 2 if number > 1 and node == FIRST else node - FIRST)
    strategy = build(name)

    excluded = rejected_by_round(strategy, grid, 3)

    assert set.union(*excluded) <= {FIRST}
    assert FIRST in set.union(*excluded) or name == "akd"
    assert sorted(strategy.parties_) == list(range(NUM_PARTIES))


@pytest.mark.parametrize("name", ["fedmd", "fedavg", "avgkd", "pkd"])
def test_a_new_number_in_every_round_adds_no_parties(name: str) -> None:
    """A node has one number for the whole run, so there are never more parties than nodes."""
    grid = Masked(lambda number, node: 10 * number if node == LAST else node - FIRST)
    strategy = build(name)

    excluded = rejected_by_round(strategy, grid, 4)

    assert excluded[0] == set()
    assert excluded[1:] == [{LAST}] * 3
    assert sorted(strategy.parties_) == [0, 1, 2, 10]


@pytest.mark.parametrize("name", ["fedmd", "fedavg", "avgkd", "pkd"])
def test_a_newcomer_cannot_take_the_number_of_a_party_that_is_there(name: str) -> None:
    """The known node is preferred, also when both are new to this round's replies."""
    grid = Masked(lambda _, node: 0 if node == LAST else node - FIRST)
    grid.away = {LAST}
    strategy = build(name, num_parties=3)

    first = rejected_by_round(strategy, grid, 1)
    grid.away = set()
    later = rejected_by_round(strategy, grid, 2)

    assert first == [set()]
    assert later == [{LAST}] * 2
    assert "which node 1000 has in this run" in strategy.rejected_[LAST]
    assert sorted(strategy.parties_) == [0, 1, 2]


@pytest.mark.parametrize("name", ["fedmd", "fedavg", "akd", "avgkd", "pkd"])
def test_a_newcomer_stands_in_for_a_party_only_while_that_is_away(name: str) -> None:
    """A party without a key comes back as another node; who was first stays preferred."""
    grid = Masked(lambda _, node: 0 if node == LAST else node - FIRST)
    grid.away = {LAST}
    strategy = build(name, num_parties=3)
    rejected_by_round(strategy, grid, 1)
    grid.away = {FIRST}

    away = rejected_by_round(strategy, grid, 3)
    grid.away, before = set(), len(grid.asked)
    back = rejected_by_round(strategy, grid, 3)

    assert set.union(*away) == set()
    if name in {"fedmd", "fedavg", "avgkd", "pkd"}:
        assert back == [{LAST}] * 3
    assert FIRST in {node for nodes in grid.asked[before:] for node in nodes}
    assert sorted(strategy.parties_) == [0, 1, 2]


def test_who_is_who_survives_a_resume(tmp_path: Path) -> None:
    """A node cannot use the server's restart to become somebody else."""
    start = build("fedmd", checkpoint_dir=tmp_path)
    start.start(Masked(honest), ArrayRecord(), num_rounds=2)
    grid = Masked(lambda _, node: 2 if node == FIRST else node - FIRST)
    # The third node is away, so nobody else has the number in the resumed round.
    grid.away = {FIRST + 2}

    resumed = build("fedmd", checkpoint_dir=tmp_path, resume=True, num_parties=4)
    resumed.start(grid, ArrayRecord(), num_rounds=3)

    assert set(resumed.rejected_) == {FIRST}
    assert "must stay the same" in resumed.rejected_[FIRST]


def test_parties_that_come_back_as_new_nodes_do_not_count_twice(tmp_path: Path) -> None:
    """Answers from before a resume stand; new nodes of the same parties repeat nothing."""

    class Dying(Masked):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            if len(list(tmp_path.glob("round-*/train/*.message"))) == 2:
                raise Killed
            return super().pull_messages(message_ids)

    with pytest.raises(Killed):
        build("fedkt", checkpoint_dir=tmp_path).start(Dying(honest), ArrayRecord(), 1)
    grid = Masked(lambda _, node: (node - FIRST) % NUM_PARTIES, 2 * NUM_PARTIES)
    grid.away = {FIRST, FIRST + 1, FIRST + 2, LAST}
    resumed = build("fedkt", checkpoint_dir=tmp_path, resume=True, evaluate=False)
    result = resumed.start(grid, ArrayRecord(), 1)

    assert sorted(resumed.parties_) == list(range(NUM_PARTIES))
    assert set(resumed.rejected_) == {LAST + 1, LAST + 2}
    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == NUM_PARTIES


REGISTERED = {FIRST + number: number for number in range(NUM_PARTIES)}


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_node_that_the_operator_has_not_registered_is_not_asked(name: str) -> None:
    """With members given, an unknown node that connects learns nothing and adds nothing."""
    grid = Masked(lambda _, node: 2 if node > LAST else node - FIRST, NUM_PARTIES + 1)
    strategy = build(name, members=REGISTERED)

    excluded = rejected_by_round(strategy, grid, rounds_of(name))

    assert excluded == [set()] * rounds_of(name)
    assert LAST + 1 not in {node for nodes in grid.asked for node in nodes}
    assert sorted(strategy.parties_) == list(range(NUM_PARTIES))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_registered_node_cannot_claim_anothers_number(name: str) -> None:
    """The number belongs to the node, so only the liar is excluded, in the first round too."""
    grid = Masked(lambda _, node: 2 if node == FIRST else node - FIRST)
    strategy = build(name, members=REGISTERED)

    excluded = rejected_by_round(strategy, grid, 1)

    assert excluded == [{FIRST}]
    assert "must stay the same as this node's own, 0, got 2" in strategy.rejected_[FIRST]
    assert sorted(strategy.parties_) == [1, 2, 3]


def test_unregistered_nodes_do_not_count_as_parties_that_are_waited_for() -> None:
    """A run does not begin with nodes that may not take part."""
    grid = Masked(honest, 8)
    strategy = build("fedkt", members={node: node for node in range(2000, 2004)})

    with pytest.raises(NotEnoughParties, match="got 0"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


def test_members_that_cannot_be_are_refused() -> None:
    for members, rule in (
        ({1: 0, 2: 0, 3: 1, 4: 2}, "one node for each party"),
        ({1: 0, 2: -1, 3: 1, 4: 2}, "whole numbers, at least 0"),
        ({1: 0}, "at least num_parties=4 nodes"),
    ):
        with pytest.raises(InvalidParameter, match=rule):
            build("fedkt", members=members)


def test_a_members_file_binds_nodes_to_numbers(tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    path.write_text("0 = 9000000000000000001\n1 = 12\n")

    assert read_members(path) == {9000000000000000001: 0, 12: 1}


@pytest.mark.parametrize(
    "text", ["0 = 5\n1 = 5\n", "0 = 'a'\n", "a = 5\n", "0 = 5\n0 = 6\n", "["]
)
def test_a_members_file_with_a_slip_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    path.write_text(text)

    with pytest.raises(InvalidData, match=r"members\.toml must be"):
        read_members(path)
