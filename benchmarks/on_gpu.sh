#!/bin/sh
# Builds and proves everything that needs a GPU, and leaves what it measured in a folder:
#   sh benchmarks/on_gpu.sh OUT [test|bench|all]
set -u
out=${1:?usage: sh benchmarks/on_gpu.sh OUT [test|bench|all]}
what=${2:-all}
python=${PYTHON:-python3}
mkdir -p "$out"

echo "== build"
"$python" setup.py build_ext --inplace >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
"$python" -m pytracer doctor | tee "$out/doctor.txt"

status=0
if [ "$what" != bench ]; then
    echo "== tests that need a GPU"
    "$python" -m pytest -q -m cuda tests >"$out/tests.txt" 2>&1 || status=1
    tail -n 60 "$out/tests.txt"
fi
if [ "$what" != test ]; then
    echo "== benchmarks"
    "$python" benchmarks/overhead.py --out "$out" 2>&1 | tee "$out/overhead.txt" || status=1
    "$python" benchmarks/ledger.py --out "$out" >"$out/ledger.txt" 2>&1 || status=1
    cat "$out/ledger.txt"
    "$python" benchmarks/gemm.py --out "$out" 2>&1 | tee "$out/gemm.txt" || status=1
    "$python" benchmarks/cost.py --out "$out" >"$out/cost.txt" 2>&1 || status=1
    tail -n 60 "$out/cost.txt"
fi
exit $status
