"""Routes of vLLM's server that its app does not serve here: why not, and who may call them.

Engine routes are under ``/mmrouter/workers``, see ``operate.py``. ``setup/limits_page.py`` has the
others. A test finds each route of vLLM's in exactly one table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from frontend.http.operator.operation_queries import READS

PROFILER: Final = frozenset({"/start_profile", "/stop_profile"})
"""Routes that run an operation on all workers."""

ADAPTERS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that load or unload an adapter at all workers of a model."""

_WEIGHTS: Final = (
    "each engine would need a rank of its own among the trainer's processes, and pickled handles "
    "would come along: pause the workers and have them read their weights from disk again "
    "(POST /mmrouter/workers/reload_weights), or replace them one after the other"
)
_VERSION: Final = "workers keep no version of their weights: name it in --served-model-name"
_ADAPTERS: Final = "POST /v1/load_lora_adapter and /v1/unload_lora_adapter do it"
_SCALING: Final = "a fleet is scaled by starting and stopping workers"
_ABORT: Final = (
    "clients end their requests by closing the connection; "
    "POST /mmrouter/workers/pause?mode=abort ends all"
)
_FAULTS: Final = "it is for the ranks of one server; a worker that fails is left by its requests"

_REFUSED: Final[Mapping[str, str]] = {
    _WEIGHTS: """
        /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update
        /start_draft_weight_update /update_weights /finish_weight_update
    """,
    "it is for a trainer's processes, and weight transfer is not routed": "/weight_checker",
    _VERSION: "/update_weight_version /weight_info",
    "workers differ in it, and what it is for, weight transfer, is not routed": "/get_world_size",
    _ADAPTERS: "/adapters /adapters/{adapter_name}",
    _SCALING: "/scale_elastic_ep /is_scaling_elastic_ep",
    _ABORT: "/abort_requests /inference/v1/abort_requests",
    _FAULTS: "/fault_tolerance/apply /fault_tolerance/status",
    "it has engines call any method by its name; what workers do stands in a closed list": (
        "/collective_rpc"
    ),
    "frontends read KV events, and learn from cards where": "/kv_event_sources",
    "no WebSocket is spoken": "/v1/realtime",
    "GET /mmrouter/workers says it of each worker": "/is_paused /is_sleeping",
}

_OURS: Final = frozenset({"/reload_weights"})
"""Operations of workers for which vLLM has no route."""

_AT_WORKERS: Final = (
    {f"/{name}" for name in READS}
    - PROFILER
    - _OURS
    - {path.removeprefix("/v1") for path in ADAPTERS}
)

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {path: reason for reason, paths in _REFUSED.items() for path in paths.split()}
    | {path: f"POST /mmrouter/workers{path} does it" for path in _AT_WORKERS}
)
"""Routes that answer 501, and why."""

REPLACED: Final = PROFILER | ADAPTERS | REFUSED.keys()
"""Routes of vLLM's app that ours replace."""

_OF_USERS: Final = {"/v1/realtime"}
"""Refused routes that users may call."""

MANAGEMENT: Final = frozenset(
    path.removeprefix("/") for path in {*REPLACED, "/server_info"} - _OF_USERS if "{" not in path
)
"""Admins' routes, and all paths below: they concern the server, not one request."""
