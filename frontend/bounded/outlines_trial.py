"""Compile a structure as outlines does. A separate module, since it loads vLLM."""

import time

import outlines_core
from outlines_core import json_schema
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_outlines import validate_regex_is_buildable

from frontend.bounded.orders import COMPILES, READ_S, REFUSED, Structure


def compile_by_outlines(vocabulary: outlines_core.Vocabulary, order: Structure) -> bytes:
    """Return ``COMPILES``, ``REFUSED``, or nothing if it costs too much; masks are all compiled."""
    if order.kind not in ("json", "regex"):
        return REFUSED
    began = time.process_time()
    try:
        pattern = order.text
        if order.kind == "json":
            pattern = json_schema.build_regex_from_schema(order.text)
        validate_regex_is_buildable(pattern)
        if time.process_time() - began > READ_S:
            return b""
        outlines_core.Index(pattern, vocabulary)
    except (RecursionError, OverflowError):
        return b""  # vLLM would answer 500
    except (VLLMValidationError, RuntimeError, ValueError, TypeError, KeyError):
        return REFUSED
    return COMPILES
