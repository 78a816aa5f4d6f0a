"""Certificates and node keys, made by the commands that docs/deployment.md shows."""

import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from fl_strategies.exceptions import StrategyError

_DAYS: Final = "365"
LOOPBACK: Final = "DNS:localhost,IP:127.0.0.1"


class CredentialsFailed(StrategyError, RuntimeError):
    """A certificate or key could not be made."""


class Certificates(NamedTuple):
    """Files of an own certificate authority and of the server that it vouches for."""

    authority: Path
    server: Path
    server_key: Path


def make_certificates(folder: Path, names: str = LOOPBACK) -> Certificates:
    """Make an own certificate authority and a server certificate for these names."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "server.ext").write_text(
        f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        "authorityKeyIdentifier=keyid\n"
    )
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    authority = ["openssl", "req", "-x509", *new_key, "-days", _DAYS]
    authority += ["-subj", "/CN=federation CA"]
    authority += ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _run([*authority, "-keyout", "ca.key", "-out", "ca.crt"], folder)
    request = ["openssl", "req", *new_key, "-subj", "/CN=superlink"]
    _run([*request, "-keyout", "server.key", "-out", "server.csr"], folder)
    signed = ["openssl", "x509", "-req", "-in", "server.csr", "-days", _DAYS]
    signed += ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "server.ext"]
    _run([*signed, "-out", "server.crt"], folder)
    return Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")


def make_node_key(path: Path) -> Path:
    """Make the key pair of a party, `path` and `path`.pub; return the public one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", ""]
    _run([*command, "-f", path.name], path.parent)
    return path.with_name(f"{path.name}.pub")


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise CredentialsFailed(
            f"{command[0]}: the command must be installed, got none."
        ) from error
    except subprocess.CalledProcessError as error:
        raise CredentialsFailed(
            f"{command[0]}: the command must end well, got {error.stderr.strip()[-300:]}"
        ) from error
