#!/usr/bin/env bash
# The whole check on a GPU, in under 6 minutes: every GPU kernel against the oracle, memory, then speed. One table at the end; exit
# status 1 if anything failed. Needs python3 (or $PYTHON) with jax, its CUDA plugin and numpy, and nothing from outside the machine.
#
#   scripts/gpu_check.sh          everything on the GPU; also written to $OUT/gpu_check.json where OUT is set
#   scripts/gpu_check.sh --cpu    dry: the kernels interpreted at tiny sizes, no GPU
#
# Compiled kernels are kept (JAX_COMPILATION_CACHE_DIR, else jaxkv's cache folder): a second run is faster.
set -u
cd "$(dirname "$0")/.." || exit 1

dry=()
case "${1:-}" in
  "") ;;
  --cpu) dry=(--cpu) ;;
  *) echo "usage: scripts/gpu_check.sh [--cpu]" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
notes=$(mktemp -d) || exit 1
trap 'rm -rf "$notes"' EXIT
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${JAXKV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/jaxkv}/xla}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}

# run PARTS SECONDS: the checks of some parts. One that ends its process has failed; the rest goes on in a new process.
run() {
  local end=$((SECONDS + $2)) tries=0 status
  while ((tries++ < 4 && SECONDS < end)); do
    timeout -k 5 $((end - SECONDS)) "$python" scripts/gpu_check.py run --parts "$1" --folder "$notes" "${dry[@]}"
    status=$?
    ((status == 0 || status == 124 || status == 137)) && return
  done
}

if ((${#dry[@]})); then
  export JAX_PLATFORMS=cpu
  for parts in decode,mosaic,write prefill,shapes,memory,bench; do run "$parts" 900 & done
  wait
else
  # Checks of numbers share the GPU; speed is measured alone. The oracle runs on the CPU.
  for part in decode prefill shapes mosaic write,memory; do run "$part" 150 & done
  wait
  run bench 170
fi

"$python" scripts/gpu_check.py report --folder "$notes" "${dry[@]}" ${OUT:+--json "$OUT/gpu_check.json"}
