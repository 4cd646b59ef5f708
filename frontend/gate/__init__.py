"""Judge the body of each request before vLLM validates it."""

from frontend.gate.body_gate import BodyGate, body_of, take_parsed_bodies
from frontend.gate.fail_fast import fail_fast
from frontend.gate.judge import MAX_BEAM_CANDIDATES
