#!/bin/sh
# Builds and proves everything that needs a GPU, and leaves what it measured in a folder:
#   sh benchmarks/on_gpu.sh OUT [PART...]
# Parts, by default all that need one GPU: tests alone overhead ledger cost gemm conformance attribution
# confirm. Each keeps what it has as it goes. Conformance and confirm go on where they were stopped.
#
# One GPU:  sh benchmarks/on_gpu.sh OUT overhead      6 minutes: each case in each mode, beside peers
#           sh benchmarks/on_gpu.sh OUT host_bound    6 minutes: where the host is the limit, without peers
#           sh benchmarks/on_gpu.sh OUT whose_time    3 minutes: samples of the same cases
#           sh benchmarks/on_gpu.sh OUT replays       3 minutes: traces replayed at their own settings
# Two GPUs: sh benchmarks/on_gpu.sh OUT halves        8 minutes: as overhead, half of the cases on each GPU
#           sh benchmarks/on_gpu.sh OUT ddp           4 minutes: the case of overhead.py with two ranks
#           sh benchmarks/on_gpu.sh OUT ranks         14 ways, each 60 s at most; `WAYS="fsdp2 ddp"` for some
#           sh benchmarks/on_gpu.sh OUT imagine_ranks
# Before its first part each builds, which takes about 2 minutes.
set -u
out=${1:?usage: sh benchmarks/on_gpu.sh OUT [tests|alone|overhead|host_bound|whose_time|halves|ledger|cost|gemm|conformance|attribution|confirm|ddp|ranks|imagine_ranks|replays|attention]...}
shift
python=${PYTHON:-python3}
mkdir -p "$out"

echo "== build"
"$python" setup.py build_ext --inplace >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
"$python" -m pytracer doctor | tee "$out/doctor.txt"

status=0
one_gpu=gpt2-gpu-bound,gpt2-host-bound,bert-large,resnet50,compiled-gpt2,generate,reinforcement
# Those that time the GPU, or read the device as a whole, run by themselves.
tests() { PYTRACER_TIER=ci "$python" -m pytest -q -p no:benchmark -n 8 -m "cuda and not alone" tests; }
alone() { PYTRACER_TIER=ci "$python" -m pytest -q -p no:benchmark -m "cuda and alone" tests; }
overhead() { "$python" benchmarks/overhead.py --out "$out" --minutes 6 --cases "$one_gpu"; }
host_bound() {
    "$python" benchmarks/overhead.py --out "$out" --minutes 6 --no-peers \
        --cases gpt2-host-bound,bert-large,compiled-gpt2,resnet50,reinforcement,generate
}
whose_time() {
    "$python" benchmarks/whose_time.py --out "$out" --seconds 20 \
        --cases gpt2-host-bound bert-large compiled-gpt2 resnet50 reinforcement generate
}
# Each half has a GPU and half of the CPU's cores. Peers run beside the cases of the first half.
halves() {
    cores=$(($(nproc) / 2))
    half 0 "0-$((cores - 1))" gpt2-gpu-bound 1 &
    first=$!
    half 1 "$cores-$((2 * cores - 1))" bert-large,resnet50,reinforcement,generate 6.7 --no-peers &
    wait "$first" && half 0 "0-$((cores - 1))" gpt2-host-bound,compiled-gpt2 5.6 && wait
}
half() { # half GPU CORES CASES MINUTES [OPTION]...
    gpu=$1 cores=$2 cases=$3 minutes=$4
    shift 4
    CUDA_VISIBLE_DEVICES=$gpu taskset -c "$cores" "$python" benchmarks/overhead.py --out "$out" \
        --minutes "$minutes" --cases "$cases" "$@"
}
ddp() { "$python" benchmarks/overhead.py --out "$out" --minutes 4 --cases ddp; }
# shellcheck disable=SC2086 - several words
ranks() { "$python" benchmarks/ranks.py --out "$out" ${WAYS:+--ways $WAYS}; }
imagine_ranks() { "$python" benchmarks/imagine_ranks.py --out "$out"; }
replays() { "$python" benchmarks/imagine.py replays --out "$out"; }
attention() { "$python" benchmarks/attention.py --out "$out"; }
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
