#!/usr/bin/env bash
# Starts workers and a frontend on this machine, and ends them together: `mmrouter up`, whose flags
# these variables are. WORKERS=4, for example, is --workers=4.
#
#   MODEL=... examples/launch/agg_multimodal_router.sh [more flags, vLLM's too]
#
# One worker per GPU; SINGLE_GPU=true packs all of them on the first one; CPU where vLLM's CPU build
# is installed or there is no GPU.
#
#   MODEL                   directory or name of the model (the demo's, which is made)
#   WORKERS                 number of workers (one for each GPU, 2 on a CPU); 0 for frontends only,
#                           with DISCOVERY
#   FRONTENDS               number of frontends (1), the second on PORT + 1 and so on; 0 for workers
#                           only, with DISCOVERY
#   HOST, PORT              where the frontend listens (127.0.0.1, any free port)
#   ROUTER_MODE             kv or round-robin (kv)
#   ENGINE_ARGS             more vLLM engine flags for every worker, quoted as in a shell
#   FRONTEND_ARGS           more flags for the frontends, --ssl-certfile and --uds among them
#   CLIENT_CERT, CLIENT_KEY PEM files that this script shows to frontends with --ssl-cert-reqs=2
#   DYNAMO_MM_TRANSFER      shm or nixl: media go that way or inline; unset chooses for each worker.
#                           FRONTEND_ARGS=--mm-arena-gb=0 leaves inline alone
#   DYNAMO_DISABLE_NIXL_MM  1: media go as users send them, and workers process them
#   DISCOVERY               directory or URL where cards lie (one that goes with this script)
#   FLEET_KEY_FILE          key of the fleet, as `mmrouter fleet-key new FILE` makes it
#   WORKER_HOST             address at which other hosts reach these workers; needs the key
#   WORKER_NAME             what workers are called, before their number (worker; the name of the
#                           host where DISCOVERY is given)
#   SINGLE_GPU              true: all workers share the first GPU
#   GPU_MEMORY_UTILIZATION  share of a GPU for each worker that shares it (0.9 / WORKERS)
#   GPUS_PER_WORKER         GPUs given to each worker (1), as for --tensor-parallel-size
#   CUDA_VISIBLE_DEVICES    GPUs to share out, by number or UUID, MIG instances by UUID (all)
#   START_TIMEOUT           seconds until a start is given up (900)
#   RUN_DIR                 where the logs go (.runs/ and the time, in the working directory)
#   MMROUTER_PYTHON         interpreter (.venv/bin/python)
set -euo pipefail

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{s/^# \{0,1\}//; /^set /d; p}' "$0"; exit; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export MMROUTER_PYTHON=${MMROUTER_PYTHON:-$root/.venv/bin/python} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
[[ -x $MMROUTER_PYTHON ]] || { echo "error: $MMROUTER_PYTHON is missing: run 'make setup' first" >&2; exit 1; }

flags=(--port="${PORT:-0}" ${MODEL+--model="$MODEL"})
for name in WORKERS FRONTENDS HOST ROUTER_MODE ENGINE_ARGS FRONTEND_ARGS DISCOVERY FLEET_KEY_FILE WORKER_HOST \
    WORKER_NAME GPU_MEMORY_UTILIZATION GPUS_PER_WORKER START_TIMEOUT RUN_DIR; do
    flag=${name,,}
    [[ -z ${!name:-} ]] || flags+=("--${flag//_/-}=${!name}")
done
case ${SINGLE_GPU:-false} in
    true) flags+=(--single-gpu) ;;
    false) ;;
    *) echo "error: SINGLE_GPU='$SINGLE_GPU' is not one of: true false" >&2; exit 2 ;;
esac
# Workers run a model's own code; the frontends must, too, to know its processor.
[[ ${ENGINE_ARGS:-} != *--trust-remote-code* ]] || flags+=(--trust-remote-code)
exec "$MMROUTER_PYTHON" -m common.launcher "${flags[@]}" "$@"
