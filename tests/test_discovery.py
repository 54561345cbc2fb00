"""Command lines and titles as they are really written, and what must never be kept of them."""

from __future__ import annotations

import re

import pytest

from stallwatch.frameworks import Argument, Framework, load_frameworks
from stallwatch.sources.discovery import (
    Command,
    Facts,
    argument_value,
    entry_point,
    group_hash,
    head_words,
    read_facts,
    short_model,
    speculative_name,
    understand,
)

FRAMEWORKS = load_frameworks()
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}
VLLM, SGLANG = BY_NAME["vllm"], BY_NAME["sglang"]


def command(text: str, **environ: str) -> Command:
    return understand(FRAMEWORKS, text.split(" "), environ)


def facts(text: str) -> Facts:
    found = command(text).facts
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("/usr/bin/python3 -u /opt/bin/vllm serve m", "vllm serve m"),
        ("python -m sglang.launch_server --tp 8", "-m sglang.launch_server --tp 8"),
        ("python -um sglang.launch_server", "-m sglang.launch_server"),
        ("python3.12 -msglang.launch_server", "-m sglang.launch_server"),
        ("python -W ignore -X dev -m a.b", "-m a.b"),
        ("python -Wignore -Xdev -OO app.py", "app.py"),
        ("python --check-hash-based-pycs always /x/app.py", "app.py"),
        ("python -c import(1)", "-c import(1)"),
        ("python -Bc code arg", "-c code arg"),
        ("python - x", "- x"),
        ("python", "python"),
        ("python -V", "python"),
        ("pypy3 app.py", "app.py"),
        ("python3.13t app.py", "app.py"),
        ("/opt/bin/vllm serve m", "vllm serve m"),
        ("bash -c x", "bash -c x"),
        ("pythonista app.py", "pythonista app.py"),
    ],
)
def test_the_command_is_what_its_user_thinks_of(argv: str, expected: str) -> None:
    assert " ".join(head_words(argv.split(" "))) == expected


@pytest.mark.parametrize("argv", [[], [""], ["", "x"]])
def test_a_process_without_a_command_line_has_no_command(argv: list[str]) -> None:
    """Zombies, kernel threads, a leader that ended before its threads."""
    assert head_words(argv) == ()
    assert understand(FRAMEWORKS, argv, {}).framework == ""


@pytest.mark.parametrize(
    ("argv", "framework"),
    [
        ("/venv/bin/python /venv/bin/vllm serve org/m", "vllm"),
        ("vllm serve org/m", "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python3 -m vllm.entrypoints.cli.main serve m", "vllm"),
        ("python -m sglang.launch_server --model-path m", "sglang"),
        ("sglang serve --model-path m", "sglang"),
        ("vllm bench serve", ""),
        ("vllm", ""),
        ("vllm chat", ""),
        ("/usr/bin/python3 /usr/local/bin/trtllm-serve org/m --tp_size 4", "trtllm"),
        ("trtllm-serve serve org/m", "trtllm"),
        ("python -m tensorrt_llm.commands.serve org/m", "trtllm"),
        ("text-generation-launcher --model-id org/m", "tgi"),
        ("/usr/bin/python3 /usr/local/bin/lmdeploy serve api_server org/m", "lmdeploy"),
        ("/opt/llama.cpp/llama-server -m x.gguf", "llamacpp"),
        ("python -m dynamo.frontend --http-port 8000", "dynamo"),
        ("python3 -m dynamo.vllm --model org/m", "dynamo-vllm"),
        ("python3 -m dynamo.sglang --model-path org/m", "dynamo-sglang"),
        ("python3 -m dynamo.trtllm --model org/m", "dynamo-trtllm"),
        ("trtllm-build --checkpoint_dir x", ""),
        ("lmdeploy chat org/m", ""),
        ("llama-cli -m x.gguf", ""),
        ("text-generation-router --port 3000", ""),
        ("python -m dynamo.planner", ""),
        ("bash -c vllm serve m", ""),
        ("/bin/sh -c exec vllm serve m", ""),
        ("grep vllm serve", ""),
        ("vim vllm", ""),
        ("python serve.py vllm serve", ""),
        ("python -m vllm.entrypoints.openai.api_server_test", ""),
    ],
)
def test_only_an_entry_point_makes_a_server(argv: str, framework: str) -> None:
    assert command(argv).framework == framework


@pytest.mark.parametrize(
    ("title", "role", "rank"),
    [
        ("VLLM::EngineCore", "engine", "engine"),
        ("VLLM::EngineCore_DP0", "engine", "engine"),
        ("VLLM::EngineCore_DP3", "engine", "engine3"),
        ("VLLM::Worker_TP1", "rank", "TP1"),
        ("VLLM::Worker_DP1_PP0_TP3_EP7", "rank", "DP1-PP0-TP3"),
        ("VLLM::Worker_TP1" + " " * 40, "rank", "TP1"),
        ("VLLM::Worker", "worker", "worker"),
        ("VLLM::DPCoordinator", "controller", "controller"),
        ("VLLM::APIServer_2", "worker", "worker"),
        ("sglang::scheduler", "rank", "TP0"),
        ("sglang::scheduler_TP3", "rank", "TP3"),
        ("sglang::scheduler_DP1_ATTN_CP0_TP2_EP2", "rank", "DP1-TP2"),
        ("sglang::detokenizer", "detokenizer", "detokenizer"),
        ("sglang::data_parallel_controller", "controller", "controller"),
        ("sglang::tokenizer_worker:4711", "worker", "worker"),
        ("python train.py VLLM::Worker_TP1", "", ""),
    ],
)
def test_a_title_says_what_a_process_is(title: str, role: str, rank: str) -> None:
    found = command(title)

    assert (found.role, found.rank or found.role) == (role, rank)


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        ("python -c from multiprocessing.spawn import spawn_main(tracker_fd=5) --multiprocessing-fork", "spawned"),
        ("python -c from multiprocessing.forkserver import main", "spawned"),
        ("python -c from multiprocessing.resource_tracker import main;main(9)", "tracker"),
        ("python -B /x/torch/_inductor/compile_worker/__main__.py --pickler=a", "compiler"),
        ("python train.py", "other"),
        ("VLLM::Worker_TP1", "other"),
    ],
)
def test_children_of_an_engine_are_told_apart(argv: str, kind: str) -> None:
    assert command(argv).kind == kind


def test_a_forked_child_shows_its_parents_command_and_nobody_elses() -> None:
    parent, copy, other = command("python a.py --x 1"), command("python a.py --x 1"), command("python a.py --x 2")

    assert parent.fingerprint == copy.fingerprint != other.fingerprint


def test_arguments_of_vllm_are_read() -> None:
    found = facts(
        "vllm serve /data/hub/org/big --port=9000 -tp 4 --pipeline_parallel_size 2 --data-parallel-size 2 --nnodes 2"
        ' --node-rank 1 --master-addr 10.0.0.1 --speculative-config {"method":"eagle","model":"/s"} --headless'
        " --disable-log-stats"
    )

    assert found == Facts(
        model="org/big",
        port=9000,
        tensor_parallel=4,
        pipeline_parallel=2,
        data_parallel=2,
        nnodes=2,
        node_rank=1,
        group=group_hash("10.0.0.1:29501", 2),
        speculative="eagle",
        metrics_enabled=False,
        headless=True,
    )


def test_arguments_of_sglang_are_read() -> None:
    found = facts("python -m sglang.launch_server --model-path org/m --tp 8 --speculative-algo EAGLE3 --enable-metrics")

    assert found == Facts(model="org/m", tensor_parallel=8, speculative="EAGLE3", metrics_enabled=True)


def test_without_arguments_the_frameworks_own_defaults_hold() -> None:
    assert facts("vllm serve m") == Facts(model="m", metrics_enabled=True)
    assert facts("python -m sglang.launch_server") == Facts(metrics_enabled=False)


@pytest.mark.parametrize("value", ["", "four", "-1", "1" * 30, "1e3", "$PORT", "\N{SUPERSCRIPT TWO}"])
def test_a_number_that_is_none_is_the_default(value: str) -> None:
    found = facts(f"vllm serve m --port {value} --tensor-parallel-size {value}")

    assert (found.port, found.tensor_parallel) == (None, 1)


@pytest.mark.parametrize(("value", "port"), [("0", None), ("1", 1), ("65535", 65535), ("65536", None), ("99999", None)])
def test_a_port_no_socket_can_have_is_no_port(value: str, port: int | None) -> None:
    assert facts(f"vllm serve m --port {value}").port == port


def test_patterns_are_tried_on_the_beginning_of_a_foreign_command_line() -> None:
    worker = "python -c multiprocessing.spawn"

    assert command(f"{worker} {'x' * 100_000}").kind == "spawned"
    assert command(f"python {'x' * 100_000} {worker}").kind == "other"


def test_command_lines_with_the_same_long_beginning_are_no_copies_of_each_other() -> None:
    first, second = (command(f"vllm serve {'x' * 10_000} --port {port}") for port in (1, 2))

    assert first.fingerprint != second.fingerprint


def test_the_last_of_a_repeated_argument_counts() -> None:
    assert argument_value(Argument(("--port",)), ["--port", "1", "--port=2", "--port", "3"]) == "3"


def test_an_argument_at_the_end_without_its_value_is_empty() -> None:
    assert argument_value(Argument(("--port",)), ["--port"]) == ""


def test_a_name_that_was_given_is_the_model() -> None:
    assert facts("vllm serve /mnt/a/b --served-model-name chat").model == "chat"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("org/model", "org/model"),
        ("/data/models/org/model/", "org/model"),
        ("model", "model"),
        ("s3://bucket/team/org/model", "org/model"),
        ("s3://key:secret@bucket/model", "bucket/model"),
        ("s3://key:se/cret@bucket/model", "bucket/model"),
        ("s3://key:se@cret@bucket/model", "bucket/model"),
        ("https://host/org/model?token=secret#frag", "org/model"),
        ("HTTPS://user:secret@host/model", "host/model"),
        ("oauth2:secret@host/org/model", "org/model"),
        ("secret@host/model", "host/model"),
        ("user:secret@host", "host"),
        ("model@main", "model@main"),
        ("org/model@main", "org/model@main"),
        ("model@sha256:7f", "model@sha256:7f"),
        ("org/model:Q4_K_M", "org/model:Q4_K_M"),
        ("org/model&key=secret", "org/model"),
        ("model, token secret", "model"),
        ("token-classifier/secretary", "token-classifier/secretary"),
        ("sk-learn/hf_model", "sk-learn/hf_model"),
        ("/models/hf_llama3.1_70b_instruct", "models/hf_llama3.1_70b_instruct"),
        ("hf_checkpoint-step-0012000", "hf_checkpoint-step-0012000"),
        ("Llama 3.1 (chat)", "Llama 3.1 (chat)"),
        ("org/hf_" + "x" * 34, "org"),
        ("", ""),
        ("a" * 300, "a" * 128),
    ],
)
def test_a_model_is_its_last_two_parts_and_never_a_secret(given: str, shown: str) -> None:
    assert short_model(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("EAGLE3", "EAGLE3"),
        ('{"model": "/x/y", "method": "ngram"}', "ngram"),
        ('{"model": "/secret/path"}', "yes"),
        ("/secret/path", "yes"),
        ("", ""),
    ],
)
def test_speculation_is_a_method_and_never_a_path(given: str, shown: str) -> None:
    assert speculative_name(given) == shown


def test_nodes_of_one_group_share_its_hash_and_the_address_is_not_in_it() -> None:
    first, second, other = (group_hash(f"10.0.0.{n}:5000", 2) for n in (1, 1, 2))

    assert first == second != other
    assert "10.0.0" not in first
    assert group_hash("10.0.0.1:5000", 1) == ""
    assert group_hash("", 2) == ""


def test_no_word_of_a_command_line_or_environment_is_kept() -> None:
    """Principle 8: what is parsed is kept, the rest is dropped."""
    found = command(
        "vllm serve org/m --api-key sk-SECRET --hf-token hf_SECRET --master-addr SECRET-host --nnodes 2"
        " --speculative-config {SECRET} --port SECRET",
        RANK="3",
        SLURM_JOB_ID="77",
    )

    assert "SECRET" not in repr(found)
    assert (found.slurm_job, found.facts and found.facts.model) == ("77", "org/m")


def test_a_job_that_is_no_number_is_no_job() -> None:
    assert command("python a.py", SLURM_JOB_ID="sk-SECRET").slurm_job == ""


def test_what_could_not_be_read_is_understood_as_nothing() -> None:
    assert understand(FRAMEWORKS, ["vllm", "serve"], {}, "timeout") == Command(reason="timeout")


def test_entry_points_are_whole_words() -> None:
    framework = Framework("x", "X", VLLM.prefix, (), entry_points=("run me",))

    assert entry_point(framework, ["run", "me", "--a"]) == ("--a",)
    assert entry_point(framework, ["run", "meow"]) is None
    assert entry_point(framework, ["run"]) is None
    assert read_facts(framework, ["--port", "1"]) == Facts()


# --- copies of the model, and the nodes they are spread over -----------------------------------------------

SGL = "python -m sglang.launch_server --model-path m"


def share(text: str) -> int:
    """Ranks on this node, as model.Server counts them."""
    found = facts(text)
    return found.tensor_parallel * found.pipeline_parallel * found.data_parallel // found.nnodes


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (f"{SGL} --tp 8", 8),
        (f"{SGL} --tp 2 --dp-size 4", 8),
        (f"{SGL} --tp 8 --dp-size 8 --enable-dp-attention", 8),
        (f"{SGL} --tp 8 --dp 4 --enable-dp-attention --pp-size 2", 16),
        (f"{SGL} --tp 16 --dp 16 --enable-dp-attention --nnodes 2 --node-rank 1 --dist-init-addr a:1", 8),
        ("vllm serve m -tp 2 -dp 4", 8),
        ("vllm serve m -tp 2 -dp 4 --data-parallel-size-local 4", 8),
        ("vllm serve m -tp 2 -dp 4 --data-parallel-size-local 2 --data-parallel-address a", 4),
        ("vllm serve m -tp 2 -dp 4 -dpl 1 --data-parallel-address a --headless --data-parallel-start-rank 3", 2),
        ("vllm serve m -tp 2 -dp 4 --data-parallel-rank 3 --data-parallel-address a", 2),
        ("vllm serve m -tp 4 -pp 2 --nnodes 2 --node-rank 1 --master-addr a --headless", 4),
        ("vllm serve m -tp 4 -dp 4 --nnodes 2 --node-rank 1 --master-addr a --headless", 8),
        ("vllm serve m -tp 2 -dp 4 --data-parallel-size-local x", 8),
    ],
)
def test_the_ranks_of_a_node_are_its_share_of_the_copies(text: str, ranks: int) -> None:
    assert share(text) == ranks


@pytest.mark.parametrize(
    ("text", "nnodes", "node_rank", "headless"),
    [
        ("vllm serve m -dp 4", 1, 0, False),
        ("vllm serve m -dp 4 -dpl 2 -dpa a", 2, 0, False),
        ("vllm serve m -dp 4 -dpl 3 -dpa a", 2, 0, False),
        ("vllm serve m -dp 4 -dpl 0 -dpa a", 2, 0, False),
        ("vllm serve m -dp 4 -dpl 2 -dpa a --headless -dpr 2", 2, 1, True),
        ("vllm serve m -dp 8 -dpl 2 -dpa a --headless -dpr 6", 4, 3, True),
        ("vllm serve m -dp 4 -dpl 2 -dpa a --headless", 2, 1, True),
        # it answers requests itself, whatever its number
        ("vllm serve m -dp 4 -dpl 2 -dpa a -dpr 2", 2, 0, False),
        ("vllm serve m -dp 4 -dpn 3 -dpa a", 4, 0, False),
        ("vllm serve m --nnodes 3 -r 2 --master-addr a --headless", 3, 2, True),
        (f"{SGL} --nnodes 2 --node-rank 1 --dist-init-addr a:1", 2, 1, False),
    ],
)
def test_who_follows_whom(text: str, nnodes: int, node_rank: int, headless: bool) -> None:
    found = facts(text)

    assert (found.nnodes, found.node_rank, found.headless) == (nnodes, node_rank, headless)


SGL_NODE = f"{SGL} --tp 16 --nnodes 2"
VLLM_NODE = "vllm serve m -tp 16 --nnodes 2"
VLLM_COPY = "vllm serve m -dp 4 -dpl 2"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            f"{SGL_NODE} --node-rank 0 --dist-init-addr Head:5000",
            f"{SGL_NODE} --node-rank 1 --nccl-init-addr head:5000",
        ),
        (
            f"{VLLM_NODE} --master-addr 10.0.0.1",
            f"{VLLM_NODE} -r 1 --headless --master-addr=10.0.0.1 --master-port 29501",
        ),
        (f"{VLLM_COPY} -dpa 10.0.0.1 -dpp 29550", f"{VLLM_COPY} -dpa 10.0.0.1 --headless -dpr 2"),
        ("vllm serve m -dp 4 -dpn 0 -dpa h", "vllm serve m --port 8001 -dp 4 -dpn 3 -dpa h"),
    ],
)
def test_all_nodes_of_a_group_have_one_name_for_it_that_tells_no_address(first: str, second: str) -> None:
    one, other = facts(first).group, facts(second).group

    assert re.fullmatch("[0-9a-f]{12}", one)
    assert one == other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{SGL_NODE} --dist-init-addr a:1", f"{SGL_NODE} --dist-init-addr a:2"),
        (f"{SGL_NODE} --dist-init-addr a:1", f"{SGL} --tp 16 --nnodes 4 --dist-init-addr a:1"),
        (f"{VLLM_NODE} --master-addr a", f"{VLLM_NODE} --master-addr a --master-port 1"),
        (f"{VLLM_COPY} -dpa a", f"{VLLM_COPY} -dpa a -dpp 1"),
        (f"{VLLM_NODE} --master-addr a", f"{VLLM_NODE} --master-addr b"),
    ],
)
def test_two_groups_have_two_names(first: str, second: str) -> None:
    assert facts(first).group
    assert facts(first).group != facts(second).group


@pytest.mark.parametrize(
    "text",
    [
        f"{SGL} --dist-init-addr a:1",
        f"{SGL_NODE}",
        "vllm serve m --master-addr a",
        f"{VLLM_NODE}",
        f"{VLLM_COPY}",
        "vllm serve m -dp 4 -dpa a",
        "vllm serve m -tp 16 --distributed-executor-backend ray",
    ],
)
def test_a_server_alone_or_with_no_place_to_meet_is_in_no_group(text: str) -> None:
    assert facts(text).group == ""


TGI_SHARD = "/opt/conda/bin/python /opt/conda/bin/text-generation-server serve org/m --sharded --uds-path /tmp/x"
MPI_WORKER = "/usr/bin/python3 -m mpi4py.futures.server"


@pytest.mark.parametrize(
    ("argv", "variable", "titled_by"),
    [(TGI_SHARD, "RANK", "tgi"), (MPI_WORKER, "OMPI_COMM_WORLD_RANK", "")],
)
def test_a_rank_without_a_name_in_its_title_has_it_from_its_environment(
    argv: str, variable: str, titled_by: str
) -> None:
    """Any program may use MPI's pool: such a process counts below TensorRT-LLM only."""
    known, unknown, wrong = command(argv, **{variable: "3"}), command(argv), command(argv, **{variable: "x"})

    assert (known.role, known.rank, known.titled_by) == ("rank", "TP3", titled_by)
    assert [(found.role, found.rank) for found in (unknown, wrong)] == [("worker", "worker")] * 2


@pytest.mark.parametrize(
    ("argv", "port", "tensor_parallel", "model"),
    [
        ("trtllm-serve org/m --tp_size 4 --pp_size 2 --port 8001", 8001, 4, "org/m"),
        ("trtllm-serve serve org/m --tp_size=4", None, 4, "org/m"),
        ("text-generation-launcher --model-id org/m --num-shard 8 -p 80", 80, 8, "org/m"),
        ("lmdeploy serve api_server org/m --tp 8 --server-port 23334", 23334, 8, "org/m"),
        ("llama-server -m /models/x.gguf --port 8081", 8081, 1, "models/x.gguf"),
        ("llama-server -hf org/m:Q4", None, 1, "org/m:Q4"),
        ("python -m dynamo.vllm --model org/m --tensor-parallel-size 2", None, 2, "org/m"),
        ("python -m dynamo.sglang --model-path org/m --tp 2", None, 2, "org/m"),
        ("python -m dynamo.frontend --http-port 8002", 8002, 1, ""),
    ],
)
def test_the_arguments_of_every_server_are_understood(
    argv: str, port: int | None, tensor_parallel: int, model: str
) -> None:
    found = facts(argv)

    assert (found.port, found.tensor_parallel, found.model) == (port, tensor_parallel, model)


@pytest.mark.parametrize(
    ("argv", "enabled"),
    [
        ("llama-server -m x", False),
        ("llama-server -m x --metrics", True),
        ("lmdeploy serve api_server m", True),
        ("lmdeploy serve api_server m --disable-metrics", False),
        ("text-generation-launcher --model-id m", True),
    ],
)
def test_whether_a_server_has_a_page_of_metrics_is_known(argv: str, enabled: bool) -> None:
    assert facts(argv).metrics_enabled == enabled
