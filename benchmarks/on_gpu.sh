#!/bin/sh
# Builds and proves everything that needs a GPU, and leaves what it measured in a folder:
#   sh benchmarks/on_gpu.sh OUT [PART...]
# Parts, by default all: tests alone overhead ledger cost gemm conformance attribution confirm. Each keeps
# what it has as it goes. Conformance and confirm go on where they were stopped.
set -u
out=${1:?usage: sh benchmarks/on_gpu.sh OUT [tests|alone|overhead|ledger|cost|gemm|conformance|attribution|confirm]...}
shift
python=${PYTHON:-python3}
mkdir -p "$out"

echo "== build"
"$python" setup.py build_ext --inplace >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
"$python" -m pytracer doctor | tee "$out/doctor.txt"

status=0
# Those that time the GPU, or read the device as a whole, run by themselves.
tests() { PYTRACER_TIER=ci "$python" -m pytest -q -p no:benchmark -n 8 -m "cuda and not alone" tests; }
alone() { PYTRACER_TIER=ci "$python" -m pytest -q -p no:benchmark -m "cuda and alone" tests; }
overhead() { "$python" benchmarks/overhead.py --out "$out"; }
ledger() { "$python" benchmarks/ledger.py --out "$out"; }
cost() { "$python" benchmarks/cost.py --out "$out"; }
gemm() { "$python" benchmarks/gemm.py --out "$out"; }
attribution() { "$python" benchmarks/attribution.py --device cuda --out "$out/attribution.json"; }
conformance() { "$python" tools/conformance.py --device cuda --json "$out/conformance.json"; }
confirm() {
    # In a folder that stays, so that a run that is cut short is taken up.
    "$python" -m pytracer confirm --out build/confirm --json -f --html "$out/confirm.html" \
        --markdown "$out/confirm.md" >"$out/confirm.json"
}

[ $# -gt 0 ] || set -- tests alone overhead ledger cost gemm conformance attribution confirm
for part in "$@"; do
    echo "== $part"
    "$part" >"$out/$part.txt" 2>&1 || status=1
    tail -n 60 "$out/$part.txt"
done
exit $status
