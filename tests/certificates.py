"""Certificates made by openssl, for tests of TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def openssl(*arguments: object) -> str:
    """What openssl prints; the test is skipped where it is not installed."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    done = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
    return done.stdout


def speaks(address: str, version: str) -> bool:
    """Whether a server shakes hands in this version (`tls1_2`); the client's own limits are off."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    command = [program, "s_client", "-connect", address, f"-{version}", "-cipher", "ALL:@SECLEVEL=0"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    return done.returncode == 0 and "Cipher is (NONE)" not in done.stdout


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority(Pair):
    """Signs certificates; those who trust it load `certificate`."""

    folder: Path

    def sign(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        extra = ["-addext", f"subjectAltName={names}"]
        signed_by = ["-CA", self.certificate, "-CAkey", self.key]
        files = ["-keyout", pair.key, "-out", pair.certificate]
        openssl("req", "-x509", *NEW_KEY.split(), "-subj", f"/CN={name}", "-days", "2", *extra, *signed_by, *files)
        return pair

    def client(self, own: Pair | None = None) -> ssl.SSLContext:
        """A client that trusts this authority, with a certificate of its own."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.certificate)
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context


def authority(folder: Path, name: str = "authority") -> Authority:
    made = Authority(folder / f"{name}.pem", folder / f"{name}.key", folder)
    files = ["-keyout", made.key, "-out", made.certificate]
    openssl("req", "-x509", *NEW_KEY.split(), "-subj", f"/CN={name}", "-days", "2", *files)
    return made
