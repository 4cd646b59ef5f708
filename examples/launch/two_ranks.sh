#!/usr/bin/env bash
# Workers with two data-parallel ranks each, which the router knows apart.
#
#   MODEL=... [RANKS=2] [WORKERS=1] examples/launch/two_ranks.sh [vLLM engine flags]
#
# A worker takes a GPU for each rank. All variables of agg_multimodal_router.sh count here too.
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^\[/s/^# \{0,1\}//p' "$0"; exit; }
RANKS=${RANKS:-2}
WORKERS=${WORKERS:-1} GPUS_PER_WORKER=${GPUS_PER_WORKER:-$RANKS} \
    exec "$(dirname "${BASH_SOURCE[0]}")/agg_multimodal_router.sh" --data-parallel-size "$RANKS" "$@"
