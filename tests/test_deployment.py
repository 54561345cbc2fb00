"""What is deployed, as files: the unit is accepted, leaves no way to act, and every file that is mounted is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stallwatch import __version__
from stallwatch.cli import unknown_variables
from stallwatch.rules import DEFAULT_FILES

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy/systemd/stallwatch.service"
MOST_EXPOSED = 35
"""Tenths of what `systemd-analyze security` says: 0 is shut off, 100 is anything at all."""

TO_LOOK = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG"}
TO_ACT = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kill", "tkill", "tgkill"}
HIDES = {"PrivateDevices", "ProtectClock", "ProtectKernelLogs", "PrivateTmp", "PrivateNetwork", "PrivateUsers"}
HIDES |= {"ProtectProc", "ProcSubset", "DeviceAllow", "DynamicUser"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


def lines_of(unit: Path) -> list[tuple[str, str]]:
    """(key, value) of every line, in order."""
    found = (re.match(r"(\w+)=(.*)", line) for line in unit.read_text(encoding="utf-8").splitlines())
    return [(line[1], line[2].strip()) for line in found if line]


def values(key: str) -> list[str]:
    return [value for name, value in lines_of(UNIT) if name == key]


def filtered() -> tuple[set[str], set[str]]:
    """System calls and groups that the filter allows in the end, and those it takes away, as written."""
    allowed, denied = set[str](), set[str]()
    for value in values("SystemCallFilter"):
        names = set(value.lstrip("~").split())
        allowed, denied = (allowed - names, denied | names) if value[0] == "~" else (allowed | names, denied - names)
    return allowed, denied


# --- the unit of systemd -----------------------------------------------------------------------------------


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """A program has to stand where ExecStart says."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/stallwatch/bin/stallwatch", "/bin/true"))

    done = run("systemd-analyze", "verify", str(unit))

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_mistake_in_the_unit_would_be_seen(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text().replace("/opt/stallwatch/bin/stallwatch", "/bin/true") + "\n[Service]\nNonsense=1\n"
    )

    assert "Nonsense" in run("systemd-analyze", "verify", str(unit)).stderr


def test_the_unit_is_shut_off_enough() -> None:
    done = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(UNIT))

    assert done.returncode == 0, done.stdout[-300:]


def test_the_unit_has_the_rights_to_look_and_no_other() -> None:
    assert set(values("AmbientCapabilities")[0].split()) == TO_LOOK
    assert set(values("CapabilityBoundingSet")[0].split()) == TO_LOOK
    assert values("User") == ["stallwatch"]


def test_the_unit_can_attach_to_nobody_and_signal_nobody() -> None:
    allowed, denied = filtered()

    assert denied >= TO_ACT
    assert not allowed & TO_ACT
    assert allowed == {"@system-service", "capset", "setpriority"}


def test_the_unit_hides_nothing_that_has_to_be_seen() -> None:
    assert not HIDES & {name for name, _ in lines_of(UNIT)}
    assert values("ProtectSystem") == ["full"]


def test_the_unit_bounds_what_it_costs_and_how_long_it_takes() -> None:
    keys = {name for name, _ in lines_of(UNIT)}

    assert keys >= {"LimitNOFILE", "MemoryMax", "TasksMax", "CPUQuota", "WatchdogSec", "TimeoutStopSec"}
    assert (values("Type"), values("KillMode"), values("LimitCORE")) == (["notify"], ["process"], ["0"])


# --- compose -----------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def compose() -> Any:
    return load(ROOT / "deploy/compose.yaml")["services"]


def mounts() -> dict[str, Path]:
    """Where in a container -> which file or folder of this repository."""
    found = {}
    for service in compose().values():
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("."):
                source, target, mode = volume.split(":")
                assert mode == "ro", volume
                found[target] = (ROOT / "deploy" / source).resolve()
    return found


def test_every_file_that_compose_mounts_is_there() -> None:
    assert len(mounts()) >= 6
    assert [str(source) for source in mounts().values() if not source.exists()] == []


def test_the_filter_of_system_calls_that_compose_names_is_there() -> None:
    (name,) = (word.removeprefix("seccomp:") for word in compose()["stallwatch"]["security_opt"] if "seccomp" in word)
    profile = json.loads((ROOT / "deploy" / name).read_text())
    allowed = {call for rule in profile["syscalls"] for call in rule["names"] if rule["action"] == "SCMP_ACT_ALLOW"}

    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not allowed & TO_ACT


@pytest.mark.parametrize("others", [(), ("compose.gpu.yaml",)])
def test_compose_accepts_it(tmp_path: Path, others: tuple[str, ...]) -> None:
    texts = [(ROOT / "deploy" / name).read_text() for name in ("compose.yaml", *others)]

    done = composed(tmp_path, *texts)

    assert done.returncode == 0, done.stderr
    exporter = yaml.safe_load(done.stdout)["services"]["stallwatch"]
    assert ("SYSLOG" in exporter["cap_add"]) == bool(others)


def test_compose_would_see_a_word_that_is_none(tmp_path: Path) -> None:
    done = composed(tmp_path, (ROOT / "deploy/compose.yaml").read_text().replace("cap_drop:", "cap_dropped:"))

    assert done.returncode != 0
    assert "cap_dropped" in done.stderr


def composed(folder: Path, *texts: str) -> subprocess.CompletedProcess[str]:
    """What Compose makes of these files, in the folder where they lie.  Debian's release does not know `name` yet."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    words = ["docker-compose", "--project-directory", "."]
    for number, text in enumerate(texts):
        file = folder / f"{number}.yaml"
        file.write_text(re.sub(r"^name: .*\n", "", text, flags=re.MULTILINE))
        words += ["--file", str(file)]
    return subprocess.run(
        [*words, "config"], cwd=ROOT / "deploy", capture_output=True, text=True, check=False, timeout=600
    )


def test_every_named_volume_is_declared() -> None:
    used = {v.split(":")[0] for s in compose().values() for v in s["volumes"] if isinstance(v, str) and v[0] != "."}

    assert used == set(load(ROOT / "deploy/compose.yaml")["volumes"])


def test_prometheus_accepts_what_compose_gives_it(tmp_path: Path) -> None:
    text = mounts()["/etc/prometheus/prometheus.yml"].read_text()
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("/etc/prometheus/stallwatch", str(mounts()["/etc/prometheus/stallwatch"])))

    done = run("promtool", "check", "config", str(config))

    assert done.returncode == 0, done.stdout + done.stderr
    shipped = {f"/etc/prometheus/stallwatch/{name}" for name in DEFAULT_FILES}
    assert set(yaml.safe_load(text)["rule_files"]) == shipped


def test_alertmanager_accepts_what_compose_gives_it() -> None:
    done = run("amtool", "check-config", str(mounts()["/etc/alertmanager/alertmanager.yml"]))

    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_every_dashboard_and_its_data() -> None:
    (provider,) = load(mounts()["/etc/grafana/provisioning/dashboards/stallwatch.yml"])["providers"]
    (source,) = load(mounts()["/etc/grafana/provisioning/datasources/stallwatch.yml"])["datasources"]
    dashboards = sorted(mounts()[provider["options"]["path"]].glob("*.json"))

    assert len(dashboards) >= 4
    assert all(json.loads(path.read_text())["uid"] == path.stem for path in dashboards)
    home = compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {f"{provider['options']['path']}/{path.name}" for path in dashboards}
    assert source["type"] == "prometheus"
    assert source["isDefault"]


def test_what_asks_whom_agrees_in_compose() -> None:
    """All on the loopback of one machine: each address that somebody asks is one that somebody listens on."""
    services = compose()
    words = [word.partition("=")[2] for service in services.values() for word in service.get("command", [])]
    listening = {word for word in words if word.startswith("127.0.0.1:")}
    listening.add(services["stallwatch"]["environment"]["STALLWATCH_WEB_LISTEN_ADDRESS"])
    prometheus = load(mounts()["/etc/prometheus/prometheus.yml"])
    (source,) = load(mounts()["/etc/grafana/provisioning/datasources/stallwatch.yml"])["datasources"]
    asked = {target for job in prometheus["scrape_configs"] for s in job["static_configs"] for target in s["targets"]}
    asked |= {t for a in prometheus["alerting"]["alertmanagers"] for s in a["static_configs"] for t in s["targets"]}
    asked.add(source["url"].removeprefix("http://"))

    assert asked == listening
    assert all(service["network_mode"] == "host" for service in services.values())


def test_the_exporter_of_compose_may_look_and_nothing_else() -> None:
    exporter = compose()["stallwatch"]

    assert exporter["cap_drop"] == ["ALL"]
    assert set(exporter["cap_add"]) == {"SYS_PTRACE", "DAC_READ_SEARCH"}
    assert exporter["read_only"] is True
    assert exporter["pid"] == "host"
    assert not exporter.keys() & {"privileged", "user"}
    (root,) = (volume for volume in exporter["volumes"] if isinstance(volume, dict))
    assert (root["source"], root["read_only"]) == ("/", True)


def test_the_variables_of_compose_are_flags() -> None:
    assert unknown_variables(compose()["stallwatch"]["environment"]) == []


# --- Kubernetes, and what has to agree ---------------------------------------------------------------------

CHART = ROOT / "deploy/helm/stallwatch"


def daemon_set() -> Any:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/stallwatch.yaml").read_text(encoding="utf-8"))
    (found,) = (document for document in documents if document and document["kind"] == "DaemonSet")
    return found["spec"]["template"]["spec"]


def manifests() -> list[tuple[str, Any]]:
    """(file, object) of what `kubectl apply --filename deploy/kubernetes` sends, in its order."""
    files = sorted((ROOT / "deploy/kubernetes").iterdir())
    return [(file.name, thing) for file in files for thing in yaml.safe_load_all(file.read_text("utf-8")) if thing]


def test_no_object_of_the_folder_stands_there_twice() -> None:
    names = [(thing["kind"], thing["metadata"]["name"]) for _, thing in manifests()]

    assert len(names) == len(set(names)) >= 9
    assert {"Namespace", "DaemonSet", "PodMonitor", "PrometheusRule", "ConfigMap"} == {kind for kind, _ in names}


def test_the_folder_can_be_applied_as_it_is() -> None:
    """The namespace first, alone in its file; every other object in it, or in the one that the command names."""
    (first, namespace), *others = manifests()

    assert namespace["kind"] == "Namespace"
    assert first not in {name for name, _ in others}
    assert {t["metadata"].get("namespace", "stallwatch") for _, t in others} == {namespace["metadata"]["name"]}
    assert "--namespace stallwatch --filename deploy/kubernetes\n" in (ROOT / "docs/INSTALL.md").read_text("utf-8")


def test_the_pods_may_look_and_nothing_else() -> None:
    pod = daemon_set()
    (container,) = pod["containers"]
    context = container["securityContext"]

    assert pod["hostPID"] is True
    assert pod["automountServiceAccountToken"] is False
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert context["runAsNonRoot"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["appArmorProfile"] == {"type": "Unconfined"}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [m["name"] for m in container["volumeMounts"] if not m.get("readOnly")] == ["state"]


def test_nobody_reaches_the_pods_in_plain_text() -> None:
    variables = {variable["name"]: variable["value"] for variable in daemon_set()["containers"][0]["env"]}

    assert variables["STALLWATCH_WEB_CONFIG_FILE"] == "/etc/stallwatch/web.yml"
    assert unknown_variables(variables) == []


def test_the_chart_has_the_repository_s_own_rules_and_dashboards() -> None:
    """Links, so that no copy is ever behind; a packed chart has the files."""
    links = sorted((CHART / "files").rglob("*.*"))
    shipped = [ROOT / "rules" / name for name in DEFAULT_FILES]
    shipped += (ROOT / "grafana/dashboards").glob("*.json")

    assert all(link.is_symlink() for link in links)
    assert sorted(link.resolve() for link in links) == sorted(shipped)


def deployed_version() -> str:
    """As charts and tags write it: 1.0.0rc1 of Python is 1.0.0-rc1."""
    return re.sub(r"(?<=\d)(?=(?:a|b|rc)\d)", "-", __version__)


def test_everything_that_is_deployed_has_the_version_of_the_package() -> None:
    chart, version = load(CHART / "Chart.yaml"), deployed_version()
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"ARG VERSION={version}\n" in dockerfile
    assert compose()["stallwatch"]["image"] == f"stallwatch:{version}"
    for file in ("docs/INSTALL.md", "deploy/kubernetes/stallwatch.yaml"):
        told = set(re.findall(r"\bstallwatch:([\w.-]+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
        assert told - {"latest"} == {version}, file


def test_the_image_is_made_of_what_the_dockerfile_copies() -> None:
    """Everything else is left out of what is sent to whoever builds it."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)

    names = {name for line in copied for name in line.split()}
    assert {"exporter" if name == "exporter/stallwatch" else name for name in sent} == names
    assert all((ROOT / name).exists() for name in names)


def test_the_documented_container_is_that_of_compose() -> None:
    text = (ROOT / "docs/INSTALL.md").read_text(encoding="utf-8")
    command = text[text.index("docker run --detach") :].partition("```")[0].replace("\\\n", " ")
    exporter = compose()["stallwatch"]

    assert set(re.findall(r"--cap-add (\S+)", command)) == set(exporter["cap_add"])
    assert dict(word.split("=", 1) for word in re.findall(r"--env (\S+)", command)) == exporter["environment"]
    options = {word.replace(":", "=", 1).replace("./", "deploy/") for word in exporter["security_opt"]}
    assert set(re.findall(r"--security-opt (\S+)", command)) == options
    assert "--cap-drop ALL" in command
    assert "--read-only" in command
    assert f"--pid {exporter['pid']}" in command


def test_every_setting_of_the_unit_that_is_explained_is_there() -> None:
    """`Key=value` of the unit; `Key=` behind *no* or *not* is one that must be missing."""
    text = (ROOT / "docs/INSTALL.md").read_text(encoding="utf-8")
    table = text[text.index("| what the unit sets") :].partition("\n\n")[0]
    first = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    told = {match for cell in first if not cell.startswith("| no ") for match in re.findall(r"`(\w+=[^`]*\w)`", cell)}
    there = {f"{name}={value}" for name, value in lines_of(UNIT)}

    assert len(told) >= 12
    assert told <= there
    absent = {name for cell in first if cell.startswith("| no ") for name in re.findall(r"`(\w+)=`", cell)}
    assert len(absent) >= 8
    assert not absent & {name for name, _ in lines_of(UNIT)}


def install_page() -> str:
    return (ROOT / "docs/INSTALL.md").read_text(encoding="utf-8")


def test_every_file_that_a_documented_command_names_is_there() -> None:
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", install_page(), re.MULTILINE | re.DOTALL))
    named = set(re.findall(r"\b(deploy/[\w./-]+)", commands))

    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_values_of_the_chart_that_are_explained_are_there() -> None:
    table = install_page().partition("| value | default | is |")[2].partition("\n\n")[0]
    values_of_the_chart = load(CHART / "values.yaml")
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split(" | ")[0])]

    assert len(names) >= 12
    for name in names:
        value = values_of_the_chart
        for key in name.split("."):
            assert key in value, name
            value = value[key]
    written = dict(re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", table, re.MULTILINE))
    assert written == {name: yaml_word(values_of_the_chart, name) for name in written}


def yaml_word(values_of_the_chart: Any, name: str) -> str:
    """A default as a table has it: the word that stands in YAML; of a profile its type."""
    for key in name.split("."):
        values_of_the_chart = values_of_the_chart[key]
    found = values_of_the_chart["type"] if isinstance(values_of_the_chart, dict) else values_of_the_chart
    return str(found).lower() if isinstance(found, bool) else str(found)
