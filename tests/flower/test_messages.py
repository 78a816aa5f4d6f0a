"""What Flower prints when something is set up wrongly, as docs/deployment.md explains it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from simulations.config import Settings
from simulations.deploy.federation import Deployment, make_certificates, make_node_key, prepare
from simulations.runtime.flower import flower_environment, free_port
from simulations.runtime.processes import _below

pytestmark = [pytest.mark.flower, pytest.mark.deployment]

DOCS = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
PATIENCE = 240.0
ENDING = 30.0
"""Seconds in which a group must have ended, also on a busy machine."""
SETTINGS = Settings.of(strategy="fedkt", num_parties=2, num_trees=3, max_wait=240.0)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two parties that are online."""
    with Deployment(
        prepare(SETTINGS, tmp_path_factory.mktemp("messages") / "federation")
    ) as one:
        yield one


def start(
    deployment: Deployment, log: Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start one more SuperNode."""
    config = str(deployment.prepared.members[0].node_config)
    command = ["flower-supernode", "--port", str(free_port()), "--node-config", config]
    home = log.with_suffix(".home")
    home.mkdir()
    return deployment._start([*command, *arguments], flower_environment(home), log)


def wait_for(text: str, log: Path) -> None:
    """Wait until a SuperNode has printed something."""
    deadline = time.monotonic() + PATIENCE
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("unregistered key", "[code: 2004] Failed to activate SuperNode"),
        ("key in use", "[code: 2004] Failed to activate SuperNode"),
        ("no key", "[code: 2001] SuperNode authentication is enabled"),
        ("other ca.crt", "CERTIFICATE_VERIFY_FAILED"),
        ("insecure with a key", "Exit Code: 303"),
        ("insecure", "Connection attempt failed, retrying"),
        ("nobody there", "Connection attempt failed, retrying"),
        ("port in use", "address already in use"),
    ],
)
def test_a_mistake_has_the_message_of_the_docs(
    deployment: Deployment, tmp_path: Path, mistake: str, message: str
) -> None:
    """The table in docs/deployment.md says what is wrong when this is printed."""
    member = deployment.prepared.members[0]
    key, authority, address = member.key, member.folder / "ca.crt", deployment.address
    if mistake == "unregistered key":
        key = tmp_path / "node-key"
        make_node_key(key)
    if mistake == "other ca.crt":
        authority = make_certificates(tmp_path / "other").authority
    if mistake == "nobody there":
        address = f"127.0.0.1:{free_port()}"
    security = ["--root-certificates", str(authority)]
    arguments = ["--superlink", address]
    arguments += ["--insecure"] if mistake.startswith("insecure") else security
    if mistake not in ("no key", "insecure"):
        arguments += ["--auth-supernode-private-key", str(key)]
    if mistake == "port in use":
        arguments += ["--port", str(deployment.port)]
    log = tmp_path / "supernode.log"

    process = start(deployment, log, arguments)

    try:
        wait_for(message, log)
        assert f"`{message}" in DOCS
    finally:
        deployment.processes.end([process])


def test_a_supernode_ends_with_its_process_group(deployment: Deployment) -> None:
    """`kill -- -PID`, as docs/deployment.md has it, leaves no SuperExec behind.

    Nobody takes note of the SuperNode's end here, as in a container without an init.
    """
    leader = deployment._members[1]
    wait_for("Starting Flower SuperExec", deployment.prepared.members[1].log)
    family = _below({leader.pid})
    assert len(family) > 1

    os.killpg(leader.pid, signal.SIGTERM)

    deadline = time.monotonic() + ENDING
    while _below(family):
        assert time.monotonic() < deadline, "a SuperExec outlives its SuperNode"
        time.sleep(0.2)
    assert "kill -- -$(cat supernode.pid)" in DOCS
