"""What operators see of a worker, as tests want it."""

import time
from typing import Any

from common.identity import WorkerId
from frontend.http.operator.status import RankView, ShareView, WorkerView


def share(number: int) -> ShareView:
    return ShareView(requests=number, prefill_tokens=number, decode_tokens=number)


def rank_view(**fields: Any) -> RankView:
    plain: dict[str, Any] = {
        "rank": 0,
        "busy": False,
        "index": "exact",
        "reason": "",
        "blocks": 7,
        "own": share(3),
        "others": share(5),
        "running": 3,
        "waiting": 0,
        "kv_usage": 0.5,
    }
    return RankView(**plain | fields)


def gone(name: str, state: str, reason: str) -> WorkerView:
    """Return a worker that went three minutes ago."""
    return WorkerView(
        worker_id=WorkerId(name),
        incarnation="i",
        state=state,
        connected=False,
        gone_at=time.time() - 180,
        gone_reason=reason,
        request_endpoint="tcp://w",
    )


def view(name: str = "w0", **fields: Any) -> WorkerView:
    rank = rank_view()
    plain: dict[str, Any] = {
        "worker_id": WorkerId(name),
        "incarnation": "i",
        "state": "ready",
        "connected": True,
        "request_endpoint": "tcp://w",
        "transport": "shm",
        "circuit": "closed",
        "circuit_reason": "",
        "ranks": [rank],
        "active_requests": 1,
        "running": 3,
        "waiting": 0,
        "kv_usage": 0.5,
        "hf_processor_runs": 0,
    }
    return WorkerView(**plain | fields)
