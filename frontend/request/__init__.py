"""One request: six steps from a prompt to an answer, and what happens when a worker is lost."""

from frontend.request.answer_limits import prompt_weight
from frontend.request.call_gate import batch_of_request
from frontend.request.direct_events import DirectEvents
from frontend.request.engine_client import RoutedEngineClient
from frontend.request.runner import RequestRunner
from frontend.request.settings import FaultSettings
