#!/bin/sh
# Builds and proves everything that needs a GPU, and leaves what it measured in a folder:
#   sh benchmarks/on_gpu.sh OUT [test|bench|confirm|all]
set -u
out=${1:?usage: sh benchmarks/on_gpu.sh OUT [test|bench|confirm|all]}
what=${2:-all}
python=${PYTHON:-python3}
mkdir -p "$out"

echo "== build"
"$python" setup.py build_ext --inplace >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
"$python" -m pytracer doctor | tee "$out/doctor.txt"

status=0
if [ "$what" = confirm ] || [ "$what" = all ]; then
    echo "== claims"
    # In a folder that stays, so that a run that is cut short is taken up.
    "$python" -m pytracer confirm --out build/confirm --json -f --html "$out/confirm.html" \
        --markdown "$out/confirm.md" >"$out/confirm.json" || status=1
fi
if [ "$what" = test ] || [ "$what" = all ]; then
    echo "== tests that need a GPU"
    "$python" -m pytest -q -m cuda tests >"$out/tests.txt" 2>&1 || status=1
    tail -n 60 "$out/tests.txt"
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
    echo "== benchmarks"
    "$python" benchmarks/overhead.py --out "$out" 2>&1 | tee "$out/overhead.txt" || status=1
    "$python" benchmarks/ledger.py --out "$out" >"$out/ledger.txt" 2>&1 || status=1
    cat "$out/ledger.txt"
    "$python" benchmarks/gemm.py --out "$out" 2>&1 | tee "$out/gemm.txt" || status=1
    "$python" benchmarks/cost.py --out "$out" >"$out/cost.txt" 2>&1 || status=1
    tail -n 60 "$out/cost.txt"
fi
exit $status
