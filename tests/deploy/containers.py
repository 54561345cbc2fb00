"""Builds the image with buildah and runs it without an engine: no namespaces but that of mounts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.harness import Program

from .packages import BUILT_FROM, ROOT

HERE = Path(__file__).parent
BASE, IMAGE = "localhost/stallwatch-base:bookworm", "localhost/stallwatch-test"
SUITE, PACKAGES = "bookworm", "ca-certificates,python3,python3-venv"
CERTIFICATES = "/etc/ssl/certs"
BUILD_SECONDS = 400.0


class CannotBuildError(RuntimeError):
    """There is no buildah or no base here; the text says what is missing."""


def buildah(*words: str, check: bool = True) -> str:
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
    assert not check or done.returncode == 0, f"buildah {words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def base(folder: Path) -> str:
    """The name of an image to build on: $STALLWATCH_TEST_BASE, or one made here; CannotBuildError without either."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        raise CannotBuildError("root and buildah are needed")
    if given := os.environ.get("STALLWATCH_TEST_BASE"):
        return given
    if buildah("images", "--quiet", BASE, check=False):
        return BASE
    if shutil.which("debootstrap") is None:
        raise CannotBuildError("no debootstrap, and $STALLWATCH_TEST_BASE names no base")
    words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder / "rootfs")]
    try:
        subprocess.run(words, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)
    except subprocess.SubprocessError as error:
        raise CannotBuildError(f"debootstrap: {error}") from None
    subprocess.run(["tar", "-C", str(folder / "rootfs"), "-cf", str(folder / "rootfs.tar"), "."], check=True)
    shutil.rmtree(folder / "rootfs")
    buildah("bud", "--isolation", "chroot", "-q", "-t", BASE, "-f", str(HERE / "base/Dockerfile"), str(folder))
    return BASE


def build(on: str, folder: Path) -> str:
    """The image of this tree, as the Dockerfile says, unless it is here.  pip trusts whom this machine trusts."""
    image = f"{IMAGE}:{_digest(on)}"
    if buildah("images", "--quiet", image, check=False):
        return image
    for older in buildah("images", "--quiet", "--filter", f"reference={IMAGE}", check=False).split():
        buildah("rmi", "--force", older, check=False)
    settings = folder / "pip.conf"
    settings.write_text(f"[global]\ncert = {CERTIFICATES}/ca-certificates.crt\n")
    words = ["bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--quiet", "-t", image]
    words += ["--build-arg", f"BASE={on}", "--build-arg", "REVISION=trial"]
    words += ["-v", f"{CERTIFICATES}:{CERTIFICATES}:ro", "-v", f"{settings}:/etc/pip.conf:ro"]
    buildah(*words, str(ROOT))
    return image


def _digest(on: str) -> str:
    """Of the base's name and of everything that is sent to whoever builds the image."""
    found = hashlib.sha256(on.encode())
    for name in ("Dockerfile", ".dockerignore", "constraints.txt", "deploy/docker", *BUILT_FROM):
        for path in sorted([ROOT / name, *(ROOT / name).rglob("*")]):
            if path.is_file() and path.suffix != ".pyc" and "egg-info" not in str(path):
                found.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def inspect(image: str) -> dict[str, Any]:
    """The part of its description that engines read."""
    return json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Container:
    """A container of the image whose processes are started with `command`."""

    name: str

    def command(
        self,
        words: Sequence[str],
        user: str = "65532:65532",
        capabilities: Sequence[str] = (),
        mounts: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        """For subprocess.  With `--isolation chroot` its processes are seen by this machine, and it by them."""
        run = ["buildah", "run", "--isolation", "chroot", "--user", user]
        for capability in capabilities:
            run += ["--cap-add", f"CAP_{capability}"]
        for mount in mounts:
            run += ["-v", mount]
        for name, value in (environment or {}).items():
            run += ["--env", f"{name}={value}"]
        return [*run, self.name, "--", *words]

    @property
    def root(self) -> Path:
        return Path(buildah("mount", self.name))


class Contained(Program):
    """What `Container.command` starts: `buildah run` passes no signal on, so that to wait for an end is in vain."""

    def end(self, patience: float = 0.5) -> None:
        super().end(patience)
