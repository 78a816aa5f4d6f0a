"""What Flower prints when something is set up wrongly, as docs/deployment.md explains it."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from simulations.config import Settings
from simulations.deploy.credentials import make_certificates, make_node_key
from simulations.deploy.federation import Deployment, prepare
from simulations.flower import flower_environment, free_port

pytestmark = [pytest.mark.flower, pytest.mark.deployment]

DOCS = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
PATIENCE = 240.0
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
        ("unregistered key", "[code: 2004]"),
        ("key in use", "[code: 2004]"),
        ("other ca.crt", "CERTIFICATE_VERIFY_FAILED"),
        ("no key", "?"),
        ("insecure", "?"),
        ("nobody there", "?"),
        ("key insecure", "?"),
        ("port in use", "?"),
    ],
)
def test_a_mistake_has_the_message_of_the_docs(
    deployment: Deployment, tmp_path: Path, mistake: str, message: str
) -> None:
    """The table in docs/deployment.md says what is wrong when this is printed."""
    member, address = deployment.prepared.members[0], deployment.address
    key, authority = member.key, member.folder / "ca.crt"
    more = []
    if mistake == "unregistered key":
        key = tmp_path / "node-key"
        make_node_key(key)
    if mistake == "other ca.crt":
        authority = make_certificates(tmp_path / "other").authority
    if mistake == "nobody there":
        address = f"127.0.0.1:{free_port()}"
    if mistake == "port in use":
        more = ["--port", str(deployment.port)]
    arguments = ["--superlink", address, *more]
    arguments += (
        ["--insecure"] if "insecure" in mistake else ["--root-certificates", str(authority)]
    )
    if mistake not in ("no key", "insecure"):
        arguments += ["--auth-supernode-private-key", str(key)]
    log = tmp_path / "supernode.log"
    begin = time.monotonic()
    process = start(deployment, log, arguments)
    try:
        rc = process.wait(40)
    except subprocess.TimeoutExpired:
        rc = None
    print("=====", mistake, rc, time.monotonic() - begin)
    print(log.read_text()[-1500:])
    deployment.processes.end([process])
