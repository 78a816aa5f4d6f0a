"""The same app beyond one machine: parties behind a network, and Ray on two nodes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients import load_model
from simulations.config import Settings
from simulations.deploy.server_app import model_hash
from simulations.federation import load_federation
from simulations.runtime.client_app import app as simulated_app
from simulations.runtime.flower import SuperLink, run_and_read
from simulations.runtime.local import run_local
from tests.flower import namespaces
from tests.flower.namespaces import NUM_PARTIES, SETTINGS
from tests.flower.ray_cluster import RayCluster

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.flower, pytest.mark.deployment]


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the fingerprint of the model that the in-process runner ends in."""
    strategy = load_federation(SETTINGS).strategy()
    run_local(
        strategy, simulated_app, NUM_PARTIES, run_config=SETTINGS.to_run_config(), num_rounds=1
    )
    return model_hash(strategy.model_)


@pytest.mark.skipif(not namespaces.allowed(), reason="needs root and iproute2")
def test_parties_in_networks_of_their_own(tmp_path: Path, expected: str) -> None:
    """SuperLink and parties with an address each and no way elsewhere give the same bits."""
    command = ["unshare", "--net", sys.executable, "-m", namespaces.__name__]
    done = subprocess.run(
        [*command, str(tmp_path / "federation")], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )

    told = json.loads(done.stdout.splitlines()[-1])
    assert told["addresses"] == [["192.0.2.1"], ["192.0.2.10"], ["192.0.2.11"]]
    assert told["rejected"] == {}
    assert told["model-sha256"] == expected


def test_the_simulation_runs_on_two_nodes_of_ray(tmp_path: Path, expected: str) -> None:
    """`RAY_ADDRESS` takes the app to a cluster: a worker on each node, the same bits."""
    given: dict[str, Any] = {**SETTINGS.to_run_config(), "output-dir": str(tmp_path)}
    with RayCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        with SuperLink(simulation=True) as superlink:
            report, folder = run_and_read(
                superlink, Settings.from_run_config(given), num_supernodes=NUM_PARTIES
            )
        workers = cluster.workers_seen()

    assert report["rejected"] == {}
    assert model_hash(load_model(folder)) == expected
    assert all(seen for seen in workers), workers
