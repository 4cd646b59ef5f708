#!/usr/bin/env bash
# Workers on a host of their own; frontend_host.sh starts frontends on another.
#
#   MODEL=... WORKER_HOST=10.0.0.5 DISCOVERY=etcd://10.0.0.1/fleet FLEET_KEY_FILE=fleet.key \
#       examples/launch/worker_host.sh [vLLM engine flags]
#
# WORKER_HOST is the address of this host. The key file is the same on all hosts. NIXL lets media
# out of shared memory: `--nixl-allow-tcp --nixl-interface eth0` here and in FRONTEND_ARGS there;
# docs/security.md says what that means. All variables of agg_multimodal_router.sh count here too.
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^\[/s/^# \{0,1\}//p' "$0"; exit; }
: "${WORKER_HOST:?is the address at which frontends reach this host}"
: "${FLEET_KEY_FILE:?is needed beyond one host: mmrouter fleet-key new fleet.key}"
: "${DISCOVERY:?is where all hosts find cards: etcd://HOST/PREFIX, or a directory on one host}"
export WORKER_HOST FLEET_KEY_FILE DISCOVERY
FRONTENDS=0 exec "$(dirname "${BASH_SOURCE[0]}")/agg_multimodal_router.sh" "$@"
