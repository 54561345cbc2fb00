"""A real Prometheus comes by TLS with a password, while certificates and passwords are renewed under it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import bcrypt
import pytest

from certificates import Authority, authority

from .harness import CONFIG, PATIENCE, Program, fetch, free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.aside]

SCRAPE = "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n"
JOB = """\
- job_name: {name}
  scheme: https
  tls_config: {{ca_file: {ca}{own}}}
  {password}
  static_configs: [{{targets: ['localhost:{port}']}}]
"""
UNTRUSTED = "x509: certificate signed by unknown authority"
UNAUTHORIZED = "server returned HTTP status 401 Unauthorized"


class SecureExporter(Program):
    """`stallwatch serve` with a web configuration in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        config = folder / "stallwatch.yml"
        config.write_text(CONFIG)
        command = [str(Path(sys.executable).with_name("stallwatch")), "serve", "--config.file", str(config)]
        command += ["--web.config.file", str(folder / "web.yml"), "--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "stallwatch.log")

    def wait_started(self) -> None:
        wait_until(lambda: f"listening on https://127.0.0.1:{self.port}" in self.tail(), PATIENCE, self.tail())


class Prometheus(Program):
    """Scrapes with several jobs at once."""

    def __init__(self, folder: Path, jobs: str) -> None:
        self.port = free_port()
        config = folder / "prometheus.yml"
        config.write_text(SCRAPE + jobs)
        command = ["prometheus", "--config.file", str(config), "--log.level", "warn"]
        command += ["--storage.tsdb.path", str(folder / "data"), "--web.listen-address", f"127.0.0.1:{self.port}"]
        super().__init__(command, folder / "prometheus.log")

    def problems(self) -> dict[str, str]:
        """Job -> what is wrong with its last scrape; "" when it worked.  Jobs not scraped yet are left out."""
        status, body = fetch(f"http://127.0.0.1:{self.port}/api/v1/targets")
        targets = json.loads(body)["data"]["activeTargets"] if status == 200 else []
        return {target["labels"]["job"]: target["lastError"] for target in targets if target["health"] != "unknown"}

    def wait_for(self, **problems: str) -> None:
        """Until the last scrape of each job ended so; a part of a problem is enough."""

        def holds() -> bool:
            found = self.problems()
            return all(
                job in found and (problem in found[job] if problem else not found[job])
                for job, problem in problems.items()
            )

        wait_until(holds, PATIENCE, f"{problems}; it was {self.problems()}", 0.2)


def write_users(folder: Path, password: str) -> None:
    """web.yml anew, in one step."""
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(10)).decode()
    new = folder / "web.new"
    new.write_text(
        "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
        f"basic_auth_users: {{prometheus: '{hashed}'}}\n"
    )
    new.replace(folder / "web.yml")


def certify(folder: Path, signer: Authority) -> None:
    """server.pem and server.key anew, one after the other, as renewal tools do."""
    made = signer.sign("made")
    made.certificate.replace(folder / "server.pem")
    made.key.replace(folder / "server.key")


def test_prometheus_comes_by_tls_with_a_password_and_both_are_renewed(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    both = tmp_path / "both.pem"  # for those who may have to come by a new connection behind the renewal
    both.write_text(first.certificate.read_text() + second.certificate.read_text())
    certify(tmp_path, first)
    write_users(tmp_path, "old secret")

    with SecureExporter(tmp_path) as exporter:
        jobs = "".join(
            JOB.format(
                name=name,
                ca=trusted,
                own="",
                port=exporter.port,
                password=f"basic_auth: {{username: {user}, password: {password}}}" if user else "",
            )
            for name, trusted, user, password in (
                ("old", both, "prometheus", "old secret"),
                ("new", second.certificate, "prometheus", "new secret"),
                ("unknown", both, "somebody", "old secret"),
                ("nobody", both, "", ""),
            )
        )
        with Prometheus(tmp_path, jobs) as prometheus:
            prometheus.wait_for(old="", new=UNTRUSTED, unknown=UNAUTHORIZED, nobody=UNAUTHORIZED)

            certify(tmp_path, second)
            prometheus.wait_for(old="", new=UNAUTHORIZED)

            write_users(tmp_path, "new secret")
            prometheus.wait_for(old=UNAUTHORIZED, new="", unknown=UNAUTHORIZED, nobody=UNAUTHORIZED)

        said = exporter.output.read_text()
        assert exporter.process.poll() is None
    assert said.count("web configuration reloaded") >= 2
    assert "secret" not in said


def test_prometheus_comes_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    """Who has none, or one of another authority, is not let in."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    certify(tmp_path, ours)
    asked = ("client_auth_type: RequireAndVerifyClientCert", f"client_ca_file: {ours.certificate}")
    served = ("cert_file: server.pem", "key_file: server.key", "client_allowed_sans: [prometheus.example]")
    (tmp_path / "web.yml").write_text(f"tls_server_config: {{{', '.join((*served, *asked))}}}\n")
    shown = {
        "known": ours.sign("known", "DNS:prometheus.example"),
        "other": ours.sign("other", "DNS:other.example"),
        "stranger": theirs.sign("stranger", "DNS:prometheus.example"),
        "nobody": None,
    }

    with SecureExporter(tmp_path) as exporter:
        jobs = ""
        for name, pair in shown.items():
            own = f", cert_file: {pair.certificate}, key_file: {pair.key}" if pair else ""
            jobs += JOB.format(name=name, ca=ours.certificate, own=own, port=exporter.port, password="")
        with Prometheus(tmp_path, jobs) as prometheus:
            refused = ("other", "stranger", "nobody")
            wait_until(
                lambda: all(prometheus.problems().get(name) for name in refused), PATIENCE, "who is not let in", 0.2
            )
            prometheus.wait_for(known="")
            found = prometheus.problems()

    assert all(found[name] for name in refused)
    assert not any("HTTP status" in problem for problem in found.values()), "refused before any request"
