"""The wheel and the source distribution as users get them: whole, equal, and fit to run without the repository."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import PATIENCE, Program, fetch, free_port, wait_until

from .packages import PACKAGE, Environment, command, copy_of_the_tree, new_environment

pytestmark = [pytest.mark.e2e, pytest.mark.aside]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def tools(folder: Path) -> Environment:
    environment = new_environment(folder / "tools")
    environment.run("pip", "install", "--quiet", "build", "pipx", "setuptools>=77")
    return environment


@pytest.fixture(scope="module")
def built(tools: Environment, folder: Path) -> tuple[Path, Path]:
    """(source distribution, wheel), the wheel built from the source distribution."""
    tools.run("python", "-m", "build", "--outdir", str(folder / "dist"), str(copy_of_the_tree(folder / "tree")))
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], folder: Path) -> Environment:
    environment = new_environment(folder / "user")
    environment.run("pip", "install", "--quiet", str(built[1]))
    return environment


def files_of_the_package() -> set[str]:
    every = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(PACKAGE.parent)) for path in every}


def files_of_a_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_every_file_of_the_package_is_in_both(built: tuple[Path, Path]) -> None:
    source, wheel = built
    with tarfile.open(source) as archive:
        in_source = {name.partition("/exporter/")[2] for name in archive.getnames()}

    assert {f for f in files_of_a_wheel(wheel) if f.startswith("stallwatch/")} == files_of_the_package()
    assert files_of_the_package() <= in_source


def test_the_source_distribution_builds_the_wheel_of_the_tree(
    built: tuple[Path, Path], tools: Environment, folder: Path
) -> None:
    tree = copy_of_the_tree(folder / "tree-for-a-wheel")
    tools.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "direct"), str(tree))
    (direct,) = (folder / "direct").glob("*.whl")

    assert files_of_a_wheel(direct) == files_of_a_wheel(built[1])


def test_nothing_but_the_package_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in files_of_a_wheel(built[1])} == {"stallwatch"}


def test_its_commands_run_without_the_repository(installed: Environment) -> None:
    where = installed.run("python", "-c", "import stallwatch; print(stallwatch.__file__)").stdout
    assert str(installed.folder) in where

    version = installed.run("stallwatch", "--version").stdout
    assert version.startswith("stallwatch ")
    assert "- alert: InferenceServerStalled" in installed.run("stallwatch", "rules").stdout
    assert "barrier-deadlock" in installed.run("stallwatch", "drill", "list").stdout
    assert "sglang" in installed.run("stallwatch", "frameworks").stdout
    assert "stallwatch_server_state" in installed.run("stallwatch", "signals").stdout
    looked = installed.run("stallwatch", "check", "--for", "2s", "--url", "http://127.0.0.1:9", check=False)
    assert looked.returncode in (0, 1, 3), looked.stderr


@pytest.fixture
def serving(installed: Environment) -> Iterator[str]:
    url = f"127.0.0.1:{free_port()}"
    words = [str(installed.folder / "bin" / "stallwatch"), "serve", "--web.listen-address", url]
    with Program(words, installed.workplace / "serve.log", {"PYTHONPATH": ""}, installed.workplace) as program:
        wait_until(lambda: fetch(f"http://{url}/-/ready")[0] == 200, PATIENCE, f"ready\n{program.tail()}")
        yield url


def test_it_serves_its_first_page(serving: str) -> None:
    looked = 'stallwatch_collector_success{collector="processes"} 1'
    wait_until(lambda: looked in fetch(f"http://{serving}/metrics")[1], PATIENCE, looked)

    assert "stallwatch_build_info{" in fetch(f"http://{serving}/metrics")[1]
    assert fetch(f"http://{serving}/")[0] == 200


def test_pipx_installs_it(built: tuple[Path, Path], tools: Environment, folder: Path) -> None:
    home, bin_folder = folder / "pipx", folder / "pipx-bin"
    words = ["env", f"PIPX_HOME={home}", f"PIPX_BIN_DIR={bin_folder}"]
    command([*words, str(tools.folder / "bin" / "pipx"), "install", str(built[1])], tools.workplace)

    assert command([str(bin_folder / "stallwatch"), "--version"], folder).stdout.startswith("stallwatch ")
