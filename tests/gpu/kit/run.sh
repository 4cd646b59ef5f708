#!/usr/bin/env bash
# Runs on the GPU machine: unpacks the archive beside it, and runs `python3 -m tests.gpu` with the
# arguments. The last line of standard output is JSON. $OUT (default: this directory) gets line.json
# and logs.tar.gz.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here}
root=${TMPDIR:-/tmp}/mmrouter-gpu-kit
logs=$root/logs

python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    { echo "the kit's libraries are for Python 3.12; python3 is another" >&2; exit 1; }
python3 -c 'import torch, transformers, triton; assert torch.cuda.is_available()' ||
    { echo "PyTorch, Triton and Transformers are needed here, and a GPU" >&2; exit 1; }
if [[ ! -e $root/.unpacked ]]; then
    mkdir -p "$root"
    tar -xJf "$here/kit.tar.xz" -C "$root" --strip-components=1 && touch "$root/.unpacked" || exit 1
fi

# A container may have no loopback interface and too little shared memory for several arenas.
python3 -c 'import socket; socket.create_server(("127.0.0.1", 0))' || ip link set lo up
(($(df -m --output=size /dev/shm | tail -n 1) > 8000)) || mount -o remount,size=16G /dev/shm

export PYTHONPATH=$root/site HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1
export VLLM_USE_FLASHINFER_SAMPLER=0 # the kit has no FlashInfer
export XDG_CACHE_HOME=$root/cache TRITON_CACHE_DIR=$root/cache/triton VLLM_CACHE_ROOT=$root/cache/vllm
unset CUDA_VISIBLE_DEVICES

cd "$root/app" || exit 1
python3 -m tests.gpu --out "$logs" "$@" | tee "$out/line.json"
status=${PIPESTATUS[0]}
tar -czf "$out/logs.tar.gz" -C "$logs" --exclude=model .
exit "$status"
