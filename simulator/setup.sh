#!/bin/sh
# Sets up the simulator in a virtual environment: setup.sh VENV [TORCH_VERSION]
#
# Needs gcc, g++, Python 3.11 or newer (PYTHON=…) and pip's registry. If VENV is absent, it is made. A CPU
# build of torch in it is replaced by the CUDA build of the same version. NVIDIA's own wheels (2.5 GB)
# are not needed: torch's list of them is taken out of its metadata, so that pip installs other
# packages that need torch without fetching them. Run it again after a change of the sources.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
version=${2:-2.13.0}
build=${CUDASIM_BUILD:-$here/build/$version}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
# The machine's pip settings may prefer a CPU wheel ("2.13.0+cpu") from a local folder.
pip() { PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT= PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= "$python" -m pip --disable-pip-version-check "$@"; }

site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if [ "$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" != "$version" ] || ! test -e "$site/torch/lib/libtorch_cuda.so"; then
  echo "torch $version with CUDA (530 MB)"
  "$python" -m pip uninstall -q -y torch 2>/dev/null || true
  pip install -q --no-deps "torch==$version"
fi
"$python" - "$site" <<'P'
import sys
from pathlib import Path

(metadata,) = Path(sys.argv[1]).glob("torch-*.dist-info/METADATA")
whole = metadata.with_name("METADATA.whole")  # gen_stubs.py reads cuDNN's version there
text = metadata.read_text("utf-8")
if not whole.exists():
    whole.write_text(text, "utf-8")
unwanted = ("Requires-Dist: nvidia-", "Requires-Dist: cuda-", "Requires-Dist: triton")
kept = [line for line in text.splitlines(keepends=True) if not line.startswith(unwanted)]
metadata.write_text("".join(kept), "utf-8")
P
pip install -q filelock typing-extensions sympy networkx jinja2 fsspec numpy nvidia-ml-py

mkdir -p "$build/wheels" "$build/include" "$build/out"
cudart=$(readelf -d "$site/torch/lib/libc10_cuda.so" | sed -n 's/.*\[\(libcudart[^]]*\)\].*/\1/p')
case $cudart in *.12) runtime=nvidia-cuda-runtime-cu12==12.4.127 ;; *) runtime=nvidia-cuda-runtime==13.0.96 ;; esac
if ! test -e "$build/include/nvml.h"; then
  echo "CUDA's headers (2.5 MB)"
  pip download -q --no-deps -d "$build/wheels" "$runtime" nvidia-cuda-crt==13.0.88 nvidia-nvml-dev==13.0.87
  "$python" - "$build" <<'P'
import sys, zipfile
from pathlib import Path
build = Path(sys.argv[1])
for wheel in (build / "wheels").glob("nvidia*.whl"):
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if "/include/" in name and not name.endswith("/"):
                path = build / "include" / name.split("/include/", 1)[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(z.read(name))
P
fi

echo "building (about 20 s)"
torch=$site/torch
# torch 2.6 was compiled with the older ABI of std::string.
abi=$(nm -D --defined-only "$torch/lib/libc10.so" | grep -q 'c105ErrorC.*__cxx11' && echo 1 || echo 0)
g++ -std=c++20 -O1 -D_GLIBCXX_USE_CXX11_ABI=$abi -fPIC -fvisibility=hidden -I"$build/include" -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
  -c -o "$build/torch_ops.o" "$here/src/torch_ops.cpp" &
operations=$!  # the longest by far
g++ -std=c++17 -O2 -g -fPIC -fvisibility=hidden -Wall -I"$build/include" -c -o "$build/cudart.o" "$here/src/cudart.cpp"
g++ -std=c++20 -O2 -g -fPIC -fvisibility=hidden -Wall -I"$build/include" -I"$torch/include" -c -o "$build/nccl.o" "$here/src/nccl.cpp"
"$python" "$here/src/gen_stubs.py" "$torch/lib" "$build" "$build/cudart.o" "$build/nccl.o"
gcc -O2 -fPIC -shared -Wall -fvisibility=hidden -I"$build/include" -Wl,-soname,libnvidia-ml.so.1 \
  -o "$build/out/libnvidia-ml.so.1" "$here"/src/nvml*.c -lpthread
wait "$operations"
g++ -shared -o "$build/out/libcudasim_torch.so" "$build/torch_ops.o" -L"$build/out" -l:"$cudart" \
  -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -Wl,--allow-shlib-undefined

# Where torch's RPATH looks for NVIDIA's wheels; the builds for CUDA 12 look there by another name.
mkdir -p "$site/nvidia/cu13/lib" "$site/cudasim-0.1.dist-info"
case $cudart in *.12) ln -sfn cu13 "$site/nvidia/cuda_runtime" ;; esac
install -m 644 "$build"/out/* "$site/nvidia/cu13/lib/" # new files: a running program keeps the old ones
install -m 644 "$here/python/cudasim.py" "$site/"
printf 'import cudasim; cudasim.preload_nvml()\n' > "$site/cudasim.pth"
printf 'Metadata-Version: 2.1\nName: cudasim\nVersion: 0.1\n' > "$site/cudasim-0.1.dist-info/METADATA"
printf '[torch.backends]\ncudasim = cudasim:install\n' > "$site/cudasim-0.1.dist-info/entry_points.txt"
printf 'cudasim.py,,\ncudasim.pth,,\ncudasim-0.1.dist-info/METADATA,,\ncudasim-0.1.dist-info/entry_points.txt,,\ncudasim-0.1.dist-info/RECORD,,\n' > "$site/cudasim-0.1.dist-info/RECORD"
"$python" -c 'import torch, cudasim; print("torch", torch.__version__, "on", torch.cuda.get_device_name(), "-", cudasim.replaced, "operations computed on the CPU")'
