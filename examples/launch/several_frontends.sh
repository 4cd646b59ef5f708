#!/usr/bin/env bash
# Several frontends over the same workers of this host, each on a port of its own.
#
#   MODEL=... [FRONTENDS=2] examples/launch/several_frontends.sh [vLLM engine flags]
#
# Ask whichever you like; put a load balancer in front of them for users. All variables of
# agg_multimodal_router.sh count here too.
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^\[/s/^# \{0,1\}//p' "$0"; exit; }
FRONTENDS=${FRONTENDS:-2} exec "$(dirname "${BASH_SOURCE[0]}")/agg_multimodal_router.sh" "$@"
