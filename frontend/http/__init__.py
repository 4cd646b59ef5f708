"""HTTP server, access, admission control, streams, and routes for operators."""

from frontend.http.access.admin import AdminGuard
from frontend.http.access.api_keys import AccessKeys
from frontend.http.error_shapes import say_when_to_retry, shape_errors
from frontend.http.limits.admission import Admission
from frontend.http.operator.app import live_routes, operator_app, page_routes
from frontend.http.operator.history import History, history_routes
from frontend.http.operator.manage import Management, manage_routes
from frontend.http.operator.merged_metrics import MergedMetrics, worker_metrics_routes
from frontend.http.operator.operate import Operating, operate_routes
from frontend.http.operator.status import FleetStatus, Status, queues, status_routes
from frontend.http.server.model_choice import ModelApp, ModelChoice
from frontend.http.server.pooling import PoolingLimits, limit_pooling
from frontend.http.server.readiness_gate import ReadinessGate, graceful_shutdown
from frontend.http.server.request_ids import name_request, trace
from frontend.http.server.serving_threads import (
    describe_aside,
    limit_speech,
    prompt_speech_aside,
    tokenize_decisions_aside,
    tokenize_scores_aside,
    write_tokens_aside,
)
from frontend.http.server.tools import check_parsers
from frontend.http.server.uvicorn_server import (
    Server,
    attainable_files,
    files_needed,
    raise_file_limit,
)
from frontend.http.server.vllm_server import (
    build_vllm_app,
    list_together,
    replace_engine_routes,
    share_adapters,
    uvicorn_config,
)
from frontend.http.settings import HttpSettings
from frontend.http.streaming.stream_errors import hold_stream_heads
from frontend.http.streaming.whole_answers import send_deferred_parts
