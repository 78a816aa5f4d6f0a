"""A deployed party that says it is another one."""

from pathlib import Path

import pytest

from fl_strategies.wire import keys
from simulations.deploy.federation import Deployment
from tests.faults.conftest import Measured
from tests.faults.deployment import configure
from tests.faults.federation import FEDKT, faulty_federation, in_process, same_model
from tests.leftovers import PATIENCE

pytestmark = [pytest.mark.flower, pytest.mark.faults]

LIAR = 0


def test_a_party_that_claims_anothers_number_is_excluded_and_nobody_else(
    tmp_path: Path, measured: Measured
) -> None:
    """Its number belongs to its key, by the file that the operator wrote at registration."""
    prepared = faulty_federation(tmp_path / "federation")
    configure(prepared.members[LIAR], {keys.PARTITION_ID: 2})
    with Deployment(prepared) as deployment:
        report = deployment.run(FEDKT, timeout=PATIENCE)
        reasons = {int(node): reason for node, reason in report["rejected"].items()}

    assert set(reasons) == {deployment.node_ids[LIAR]}
    assert (
        "must stay the same as this node's own, 0, got 2" in reasons[deployment.node_ids[LIAR]]
    )
    assert [party[keys.PARTITION_ID] for party in report["parties"]] == [1, 2, 3]
    assert same_model(report, in_process(prepared, FEDKT, failing={LIAR}))
    for log in (*prepared.folder.glob("party-*/supernode.log"), prepared.members_file):
        assert log.stat().st_mode & 0o077 == 0, log
    measured("party claims another's number", report["seconds"], "excluded, by its key")
