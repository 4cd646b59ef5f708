#!/usr/bin/env bash
# A frontend on a host without workers; worker_host.sh starts them on others.
#
#   DISCOVERY=etcd://10.0.0.1/fleet FLEET_KEY_FILE=fleet.key HOST=0.0.0.0 PORT=8000 \
#       FRONTEND_ARGS='--api-key-file api.keys --admin-key-file admin.keys' \
#       examples/launch/frontend_host.sh
#
# It waits for the first worker as long as that takes. All variables of agg_multimodal_router.sh
# count here too.
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^\[/s/^# \{0,1\}//p' "$0"; exit; }
: "${FLEET_KEY_FILE:?is needed beyond one host: mmrouter fleet-key new fleet.key}"
: "${DISCOVERY:?is where all hosts find cards: etcd://HOST/PREFIX, or a directory on one host}"
export FLEET_KEY_FILE DISCOVERY
WORKERS=0 exec "$(dirname "${BASH_SOURCE[0]}")/agg_multimodal_router.sh" "$@"
