"""The shapes of /proc/PID/cgroup that runtimes make; every line counts, the last id is the workload's."""

from __future__ import annotations

import pytest

from stallwatch.sources.cgroups import Cgroup, Placement, cgroups_in, parse_cgroup, scope_of

ID, NODE = "4f" * 32, "9a" * 32
UID = "0a1b2c3d-0000-1111-2222-333344445555"
LOW = UID.replace("-", "_")
STATIC = "ab" * 16
IN_POD = Placement(ID, UID)


def _named(name: str) -> Placement:
    return Placement(container_name=name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        # Kubernetes, systemd driver
        (f"/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope", IN_POD),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope", IN_POD),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope/container",
            IN_POD,
        ),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{LOW}.slice/docker-{ID}.scope", IN_POD),
        # Kubernetes, cgroupfs driver, and static pods
        (f"/kubepods/burstable/pod{UID}/{ID}", IN_POD),
        (f"/kubepods/pod{UID}/crio-{ID}", IN_POD),
        (f"/kubepods/besteffort/pod{STATIC}/{ID}", Placement(ID, STATIC)),
        # the two drivers mixed up
        (f"/system.slice/containerd.service/kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}", IN_POD),
        # a pod that runs its own init
        (f"/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope/system.slice/x.service", IN_POD),
        # nodes inside nodes: the last id
        (
            f"/docker/{NODE}/kubelet.slice/kubelet-pod{LOW}.slice/cri-containerd-{ID}.scope",
            Placement(ID, UID, node_id=NODE),
        ),
        (f"/system.slice/docker-{NODE}.scope/docker/{ID}", Placement(ID, node_id=NODE)),
        # Docker, containerd, nerdctl
        (f"/docker/{ID}", Placement(ID)),
        (f"/system.slice/docker-{ID}.scope", Placement(ID)),
        (f"/team.slice/docker-{ID}.scope", Placement(ID)),
        (f"/docker/{ID}/init", Placement(ID)),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", Placement(ID)),
        (f"/k8s.io/{ID}", Placement(ID)),
        (f"/system.slice/nerdctl-{ID}.scope", Placement(ID)),
        # Podman: rootful, in a pod, and inside the unit that stands for the container
        (f"/machine.slice/libpod-{ID}.scope/container", Placement(ID)),
        (f"/machine.slice/machine-libpod_pod_{NODE}.slice/libpod-{ID}.scope/container", Placement(ID)),
        (f"/system.slice/llm.service/libpod-payload-{ID}", Placement(ID, unit="llm.service")),
        (f"/machine.slice/libpod-conmon-{ID}.scope", Placement()),
        # Amazon ECS
        (f"/ecs/{STATIC}/{STATIC}-3344556677", Placement(f"{STATIC}-3344556677")),
        # seen from a private cgroup namespace
        (f"/../docker-{ID}.scope", Placement(ID)),
        (f"/../../pod{UID}/{ID}", IN_POD),
        ("/", Placement()),
        ("/../../..", Placement()),
        # systemd
        ("/system.slice/vllm.service", Placement(unit="vllm.service")),
        ("/system.slice/system-vllm.slice/vllm@7b.service/worker", Placement(unit="vllm@7b.service")),
        (r"/system.slice/vllm\x2d7b.service", Placement(unit=r"vllm\x2d7b.service")),
        (f"/system.slice/run-r{STATIC}.service", Placement(unit=f"run-r{STATIC}.service")),
        ("/user.slice/user-1000.slice/session-3.scope", Placement()),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service/worker",
            Placement(user_unit="1000/llm.service"),
        ),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", Placement()),
        (f"/system.slice/var-lib-docker-{ID}-merged.mount", Placement()),
        # machines in a machine: their units are none of ours
        ("/lxc.payload.c1/system.slice/vllm.service", Placement(container_name="c1")),
        ("/lxc/101/ns/system.slice/vllm.service", Placement(container_name="101")),
        ("/lxc.payload/c1", Placement(container_name="c1")),
        (f"/lxc.payload.101/docker/{ID}", Placement(ID, node_id="101")),
        ("/lxc.monitor.c1", Placement()),
        ("/lxc.monitor/c1", Placement()),
        (r"/machine.slice/systemd-nspawn@gpu\x2dbox.service/payload/system.slice/vllm.service", _named("gpu-box")),
        ("/machine.slice/machine-box.scope", Placement(container_name="box")),
        (r"/machine.slice/machine-qemu\x2d1\x2dbox.scope", Placement()),
        # containerd's own client, Nomad, Garden
        ("/default/vllm-1", Placement(container_name="vllm-1")),
        (f"/default/{ID}", Placement(ID)),
        ("/team.slice/default/x", Placement()),
        (f"/nomad.slice/share.slice/{UID}.llm.scope", Placement(UID, container_name="llm")),
        (f"/garden/{UID}", Placement(UID)),
        (f"/run/{UID}", Placement()),
        # a pod without a container is no container; a pod of Podman is no node
        (f"/kubepods/burstable/pod{UID}", Placement("", UID)),
        (f"/libpod_parent/{NODE}/libpod-{ID}", Placement(ID)),
        (f"/libpod_parent/{NODE}", Placement()),
        # Docker in a pod
        (
            f"/kubepods/burstable/pod{UID}/{NODE}/docker/{ID}",
            Placement(ID, UID, node_id=NODE, is_nested=True),
        ),
        # whoever runs the workloads of others
        ("/system.slice/containerd.service", Placement()),
        ("/system.slice/slurmd.service", Placement()),
        ("/system.slice/snap.docker.dockerd.service", Placement()),
        ("/system.slice/containerd-stats.service", Placement(unit="containerd-stats.service")),
        ("/system.slice/vllm.service/sub.service", Placement(unit="vllm.service")),
        # Slurm
        ("/slurm/uid_1000/job_77/step_0/task_3", Placement(slurm_job="77")),
        ("/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0", Placement(slurm_job="77")),
        ("/system.slice/node1_slurmstepd.scope/job_77/step_extern/user/task_0", Placement(slurm_job="77")),
        ("/slurm_node1/uid_1000/job_77/step_0", Placement(slurm_job="77")),
        ("/../../job_77/step_0/user/task_0", Placement(slurm_job="77")),
        (f"/docker/{NODE}/slurm/uid_0/job_77/step_0", Placement(NODE, slurm_job="77")),
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0", Placement()),
        ("/system.slice/batch.service/job_77", Placement(unit="batch.service")),
        # a process whose group was removed
        (f"/docker/{ID} (deleted)", Placement(ID)),
        ("/system.slice/vllm.service (deleted)", Placement(unit="vllm.service")),
    ],
)
def test_a_path_says_where_a_process_runs(path: str, expected: Placement) -> None:
    assert parse_cgroup(f"0::{path}\n") == expected


def test_the_daemons_unit_on_the_unified_line_does_not_hide_the_container() -> None:
    text = f"12:memory:/docker/{ID}\n1:name=systemd:/\n0::/system.slice/containerd.service\n"

    assert parse_cgroup(text) == Placement(ID)


def test_a_job_is_more_telling_than_the_unit_of_its_daemon() -> None:
    text = "11:memory:/slurm/uid_7/job_9/step_0\n1:name=systemd:/system.slice/slurmd.service\n"

    assert parse_cgroup(text) == Placement(slurm_job="9")


def test_of_two_lines_that_tell_as_much_the_unified_one_wins() -> None:
    text = "5:cpu,cpuacct:/system.slice/c.service\n1:name=systemd:/system.slice/b.service\n0::/system.slice/a.service\n"

    assert parse_cgroup(text).unit == "a.service"
    assert parse_cgroup("\n".join(text.splitlines()[:2])).unit == "b.service"


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0:", "0::", ":::::"])
def test_what_says_nothing_places_nowhere(text: str) -> None:
    assert parse_cgroup(text) == Placement()


# --- the scope: what ends with the server ------------------------------------------------------------------

SESSION = "/user.slice/user-1000.slice/session-3.scope"
OWN = "/user.slice/user-1000.slice/user@1000.service"
JOB = "/system.slice/slurmstepd.scope/job_77"


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        (f"/docker/{ID}/init", f"/docker/{ID}"),
        (f"/system.slice/docker-{ID}.scope", f"/system.slice/docker-{ID}.scope"),
        (f"/kubepods.slice/kubepods-pod{LOW}.slice/crio-{ID}.scope/container", None),
        (
            f"/docker/{NODE}/kubelet.slice/cri-containerd-{ID}.scope",
            f"/docker/{NODE}/kubelet.slice/cri-containerd-{ID}.scope",
        ),
        (f"/system.slice/containerd.service/kubepods-pod{LOW}.slice:cri-containerd:{ID}", "all of it"),
        (f"/../docker-{ID}.scope", "all of it"),
        (f"{OWN}/user.slice/docker-{ID}.scope", "all of it"),
        (f"/system.slice/llm.service/libpod-payload-{ID}", "all of it"),
        ("/system.slice/vllm.service/worker", "/system.slice/vllm.service"),
        ("/system.slice/run-u7.scope", "all of it"),
        ("/system.slice/vllm.service (deleted)", "/system.slice/vllm.service"),
        (f"{JOB}/step_batch/user/task_0", f"{JOB}/step_batch"),
        (f"{JOB}/x", JOB),
        ("/slurm/uid_1000/job_77/step_0/task_3", "/slurm/uid_1000/job_77/step_0"),
        (
            "/system.slice/node1_slurmstepd.scope/s5K1KKYAYG5D00/user",
            "/system.slice/node1_slurmstepd.scope/s5K1KKYAYG5D00",
        ),
        (SESSION, SESSION),
        (f"{OWN}/app.slice/llm.service", "all of it"),
        (f"{OWN}/app.slice/tmux-spawn-1.scope", "all of it"),
        # what outlives a server that ends, or is nobody's in particular
        (f"{OWN}/app.slice", ""),
        (f"{OWN}/init.scope", ""),
        ("/init.scope", ""),
        ("/", ""),
        ("/../../..", ""),
        ("/system.slice/slurmstepd.scope", ""),
        (f"/machine.slice/libpod-conmon-{ID}.scope", ""),
    ],
)
def test_a_path_says_what_ends_with_the_server(path: str, scope: str | None) -> None:
    expected = path.removesuffix("/container") if scope is None else path if scope == "all of it" else scope
    found = scope_of(f"0::{path}\n")

    assert (found.path if found else "") == expected


def test_the_scope_is_the_one_of_the_most_telling_line() -> None:
    text = f"12:memory:/docker/{ID}\n1:name=systemd:/\n0::/system.slice/containerd.service\n"

    assert scope_of(text) == Cgroup("memory", f"/docker/{ID}")


def test_a_group_holds_what_is_in_it_and_below_it_in_the_same_hierarchy() -> None:
    group = Cgroup("", "/system.slice/a.service")

    assert group.holds("0::/system.slice/a.service\n")
    assert group.holds("3:memory:/\n0::/system.slice/a.service/worker\n")
    assert not group.holds("0::/system.slice/a.service.d\n")
    assert not group.holds("3:memory:/system.slice/a.service\n0::/\n")
    assert not group.holds("")


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0:", "0::", ":::::"])
def test_what_says_nothing_is_in_no_group(text: str) -> None:
    assert (list(cgroups_in(text)), scope_of(text)) == ([], None)
