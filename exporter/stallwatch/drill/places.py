"""Where things lie in the folder of a stand-in: caches as the libraries have them, each below its own root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_EXTENSIONS, _HUGGING_FACE = "torch_extensions", "huggingface"

FILE_LOCK = Path(_EXTENSIONS, "py312_cu128", "fused_moe", "lock")
"""Of torch.utils.cpp_extension: the file itself is the lock."""

_ETAG = "0d5f0f2c7ac1d2b4f6e8a9b0c1d2e3f40516273849a0b1c2d3e4f5061728394a"
FLOCK = Path(_HUGGING_FACE, "hub", ".locks", "models--drill--moe", f"{_ETAG}.lock")
"""Of huggingface_hub: whoever has a flock on it holds the lock."""
BLOB = Path(_HUGGING_FACE, "hub", "models--drill--moe", "blobs", _ETAG)

COMPILERS = Path("bin")
CGROUP = Path("cgroup")
"""A file that holds the path of the cgroup with a limit."""


def environment(folder: Path) -> Mapping[str, str]:
    """What tells a server where its caches are: never in those of whoever runs the drill."""
    return {"TORCH_EXTENSIONS_DIR": str(folder / _EXTENSIONS), "HF_HOME": str(folder / _HUGGING_FACE)}
