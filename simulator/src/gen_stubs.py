"""Write a stub for each NVIDIA library that a CUDA build of torch links to.

Usage: gen_stubs.py TORCH_LIB_FOLDER BUILD_FOLDER OBJECT...

The names (with their versions) are read from torch's own libraries, so this follows whatever torch
is installed. A stub answers "not supported" and says so once, unless its name promises nothing
(create, destroy, set …); those succeed. What matters is written by hand: EXTRA here, and the
objects: cudart.o is a part of libcudart, nccl.o of libnccl.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Unversioned names are told apart by their prefix.
PREFIXES = {
    "nccl": "libnccl.so.2",
    "curand": "libcurand.so.10",
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "cuda": "libcudart",  # and its version
    "__cuda": "libcudart",
    "cu": "libcuda.so.1",
}
# "Not supported" in each library's own numbers.
REFUSED = {
    "libcublas": 15,
    "libcublasLt": 15,
    "libcudnn": 3000,
    "libcusparse": 10,
    "libcusparseLt": 10,
    "libcusolver": 9,
    "libcufft": 14,
    "libcurand": 999,
    "libnccl": 3,
    "libnvrtc": 11,
    "libcupti": 27,
    "libcufile": 5001,
    "libnvshmem_host": 7,
    "libcuda": 801,
    "libcudart": 801,
}
HARMLESS = re.compile(
    r"(Create|Destroy|Free|Set[A-Z]|Init$|Finalize|GroupStart|GroupEnd|Deregister|Unsubscribe)"
)
HANDLES = (
    "cublasCreate_v2",
    "cublasLtCreate",
    "cudnnCreate",
    "cusparseCreate",
    "cusolverDnCreate",
    "cusparseLtInit",
    "curandCreateGenerator",
)
SAYS = 'const char *{name}(int e) {{ (void)e; return "not simulated"; }}'
CUDNN = "int v[] = {{{cudnn}}}"
# Written by hand; {name} is the function's, {cudnn} the numbers of cuDNN's version.
EXTRA = {
    "cudnnGetVersion": (
        "size_t {name}(void) {{ " + CUDNN + "; return v[0] * 10000 + v[1] * 100 + v[2]; }}"
    ),
    "cudnnGetProperty": "int {name}(int i, int *out) {{ " + CUDNN + "; *out = v[i]; return 0; }}",
    "cudnnGetCudartVersion": "size_t {name}(void) {{ return 13000; }}",
    "nvrtcVersion": "int {name}(int *a, int *b) {{ *a = 13; *b = 0; return 0; }}",
    "cuptiGetVersion": "int {name}(unsigned *v) {{ *v = 130000; return 0; }}",
    "cuptiGetResultString": (
        'int {name}(int e, const char **s) {{ (void)e; *s = "not simulated"; return 0; }}'
    ),
    "cufftGetVersion": "int {name}(int *v) {{ *v = 12000; return 0; }}",
    "cudnnGetErrorString": SAYS,
    "cublasGetStatusString": SAYS,
    "nvrtcGetErrorString": SAYS,
    "cusparseGetErrorString": SAYS,
}
HEAD = """#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
static int refuse(const char *name, int *said, int code) {
  if (!__atomic_exchange_n(said, 1, __ATOMIC_SEQ_CST) && getenv("CUDASIM_VERBOSE"))
    fprintf(stderr, "cudasim: %s is not simulated\\n", name);
  return code;
}
"""


def needed(library: Path) -> list[str]:
    out = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*?)\]", out)


def undefined(library: Path) -> list[str]:
    out = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True
    ).stdout
    return [line.split()[-1] for line in out.splitlines() if line.strip()]


def defined(objects: list[str]) -> set[str]:
    out = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True).stdout
    return {line.split()[-1] for line in out.splitlines() if " T " in line}


def home(name: str, cudart: str) -> str | None:
    for prefix, soname in PREFIXES.items():
        rest = name.removeprefix(prefix)
        if rest and rest != name and (prefix != "cu" or rest[0].isupper()):
            return cudart if soname == "libcudart" else soname
    return None


def cudnn_version(torch_lib: str) -> str:
    """The version that torch was built with, which it compares: "9, 20, 0"."""
    for metadata in Path(torch_lib).parents[1].glob("torch-*.dist-info/METADATA.whole"):
        text = metadata.read_text("utf-8")
        if found := re.search(r"nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", text):
            return ", ".join(found.groups())
    return "9, 20, 0"


def body(name: str, soname: str, cudnn: str) -> str:
    if name in EXTRA:
        return EXTRA[name].format(name=name, cudnn=cudnn)
    if name in HANDLES:
        # Each its own: torch keeps a workspace for each handle of cuBLAS, and a handle a thread.
        return f"int {name}(void **out) {{ *out = calloc(1, 4096); return 0; }}"
    if HARMLESS.search(name):
        return f"int {name}(void) {{ return 0; }}"
    code = REFUSED.get(soname.split(".so")[0], 1)
    return f'int {name}(void) {{ static int said; return refuse("{name}", &said, {code}); }}'


def main() -> None:
    torch_lib, build, *given = sys.argv[1:]
    folder = Path(build)
    cudnn = cudnn_version(torch_lib)
    ours = {path.name for path in Path(torch_lib).glob("*.so*")}
    symbols: dict[str, dict[str, str | None]] = defaultdict(dict)  # soname -> name -> version
    sonames: set[str] = {"libcuda.so.1"}
    (cudart,) = (n for n in needed(Path(torch_lib) / "libc10_cuda.so") if n.startswith("libcudart"))
    for library in sorted(Path(torch_lib).glob("*.so*")):
        sonames |= {n for n in needed(library) if re.match(r"lib(cu|nccl|nv)", n)} - ours
        for symbol in undefined(library):
            name, _, version = symbol.partition("@")
            if version == "NVSHMEM":
                symbols["libnvshmem_host.so.3"][name] = version
            elif re.match(r"lib(cu|nccl|nv)", version):
                symbols[version][name] = version
            elif not version and (soname := home(name, cudart)):
                symbols[soname].setdefault(name, None)
    # torch 2.6 looks all of these up by name before it calls any of them.
    content = (Path(torch_lib) / "libc10_cuda.so").read_bytes()
    for found in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", content):
        symbols["libcuda.so.1"].setdefault(found.decode(), None)
    by_hand = defined(given)
    for soname in sorted(sonames | set(symbols), key=lambda s: (not s.startswith("libcudart"), s)):
        names = symbols[soname]
        stem = folder / soname.split(".so")[0]
        objects = [path for path in given if soname.startswith(f"lib{Path(path).stem}.so")]
        link: list[str] = []
        # What cudart.cpp holds of the driver is found there.
        names = {n: v for n, v in names.items() if n not in by_hand}
        if objects:
            link += ["-lpthread", "-ldl", "-lstdc++"]
            missing = " ".join(sorted(names)) or "nothing"
            sys.stdout.write(f"{soname}, not by hand: {missing}\n")
        if soname.startswith(("libcuda.", "libnccl.")):
            link += ["-Wl,--no-as-needed", str(folder / "out" / cudart)]
        source = stem.with_suffix(".c")
        source.write_text(HEAD + "\n".join(body(n, soname, cudnn) for n in sorted(names)) + "\n")
        versions = {version for version in names.values() if version}
        if soname.startswith("libcudart"):
            versions.add(soname)
        script = stem.with_suffix(".map")
        if versions:
            script.write_text("".join(f"{v} {{ global: *; }};\n" for v in sorted(versions)))
            link.append(f"-Wl,--version-script={script}")
        output = folder / "out" / soname
        command = ["gcc", "-O1", "-fPIC", "-shared", "-w", f"-Wl,-soname,{soname}"]
        subprocess.run([*command, "-o", str(output), str(source), *objects, *link], check=True)
        sys.stdout.write(f"{soname}: {len(names)} stubs\n")


if __name__ == "__main__":
    main()
