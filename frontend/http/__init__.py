"""HTTP: the server, and who may ask how much of it."""

from frontend.http.admin import AdminGuard
from frontend.http.admission import Admission
from frontend.http.api_keys import read_keys
from frontend.http.drain import graceful_shutdown
from frontend.http.early_stream_errors import EarlyStreamErrors
from frontend.http.error_shapes import ErrorShapes
from frontend.http.file_limit import attainable_files, files_needed, raise_file_limit
from frontend.http.history import History, history_routes
from frontend.http.manage import Management, manage_routes
from frontend.http.merged_metrics import MergedMetrics
from frontend.http.model_choice import ModelApp, ModelChoice
from frontend.http.operate import Operating, operate_routes
from frontend.http.pooling import PoolingLimits, limit_pooling
from frontend.http.readiness_gate import ReadinessGate
from frontend.http.request_context import RequestIds, Traced
from frontend.http.retry_after import RetryAfter
from frontend.http.scoring import tokenize_scores_aside
from frontend.http.server import (
    build_vllm_app,
    list_together,
    replace_engine_routes,
    share_adapters,
    uvicorn_config,
)
from frontend.http.settings import HttpSettings, KeySettings
from frontend.http.speech_threads import watch_speech
from frontend.http.status import FleetStatus, Status, status_routes
from frontend.http.status_page import page_routes
from frontend.http.tools import check_parsers
from frontend.http.uvicorn_server import Server
from frontend.http.worker_metrics import worker_metrics_routes

__all__ = [
    "AdminGuard",
    "Admission",
    "EarlyStreamErrors",
    "ErrorShapes",
    "FleetStatus",
    "History",
    "HttpSettings",
    "KeySettings",
    "Management",
    "MergedMetrics",
    "ModelApp",
    "ModelChoice",
    "Operating",
    "PoolingLimits",
    "ReadinessGate",
    "RequestIds",
    "RetryAfter",
    "Server",
    "Status",
    "Traced",
    "attainable_files",
    "build_vllm_app",
    "check_parsers",
    "files_needed",
    "graceful_shutdown",
    "history_routes",
    "limit_pooling",
    "list_together",
    "manage_routes",
    "operate_routes",
    "page_routes",
    "raise_file_limit",
    "read_keys",
    "replace_engine_routes",
    "share_adapters",
    "status_routes",
    "tokenize_scores_aside",
    "uvicorn_config",
    "watch_speech",
    "worker_metrics_routes",
]
