"""Compile clients' structures of answers, each in a process of its own: ``structure_server FD``.

An engine compiles them in a few threads without limit: 256 bytes of ``[a-z]?`` take more than 12 s
with a large vocabulary, and block other structures. Between its steps it makes a mask for each
token: 10 KB of ``(a*)*`` took 9 s for one, and no request went on. Some take gigabytes of a
frontend when they are only read. Structures that cost too much here reach neither.
"""

import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import llguidance
import numpy as np
import xgrammar

from frontend.bounded.forks import serve
from frontend.bounded.nullable_runs import MAX_RUN, longest_run
from frontend.bounded.orders import (
    COMPILES,
    READ_BYTES,
    READ_S,
    REFUSED,
    STEP_S,
    STEPS,
    THREADS,
    Structure,
    Vocabulary,
)


def compile_by_xgrammar(
    info: xgrammar.TokenizerInfo, compact: bool, falls_back: bool, order: Structure
) -> bytes:
    """Return ``COMPILES``, ``REFUSED`` by xgrammar, or nothing if it costs too much.

    Args:
        falls_back: whether vLLM gives guidance what xgrammar refuses. An engine of vLLM 0.32 uses
            the backend of its first structure for all others, so guidance must read them all.
    """
    # First, since memory is measured by its peak, which compiling raises.
    if falls_back and not _is_read_cheaply(compact, order):
        return b""
    compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
    reading = _Reading()
    try:
        grammar = _read(order)
        if not reading.is_cheap() or longest_run(str(grammar)) > MAX_RUN:
            return b""
        slowest = _slowest_mask(_compile(compiler, compact, order))
        if slowest > STEP_S:
            return b""
        return COMPILES + b"%.6f" % slowest
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        if "bad_alloc" in str(error) or not reading.is_cheap():
            return b""
        return REFUSED


def compile_by_guidance(compact: bool, order: Structure) -> bytes:
    """Return as ``compile_by_xgrammar`` does. vLLM explains what is wrong with a structure."""
    return COMPILES + b"0" if _is_read_cheaply(compact, order) else b""


def compile_by_outlines(vocabulary: Any, order: Structure) -> bytes:
    """Return ``COMPILES``, ``REFUSED``, or nothing if it costs too much; masks are all compiled.

    Imports vLLM, which structures for other backends do without.
    """
    from outlines_core import Index, json_schema
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_outlines import validate_regex_is_buildable

    if order.kind not in ("json", "regex"):
        return REFUSED
    reading = _Reading()
    try:
        pattern = order.text
        if order.kind == "json":
            pattern = json_schema.build_regex_from_schema(order.text)
        validate_regex_is_buildable(pattern)
        if not reading.is_cheap():
            return b""
        Index(pattern, vocabulary)
    except (RecursionError, OverflowError):
        return b""  # vLLM would answer 500
    except (VLLMValidationError, RuntimeError, ValueError, TypeError, KeyError):
        return REFUSED if reading.is_cheap() else b""
    return COMPILES + b"0"


class _Reading:
    """CPU time and memory that this process took since, to read a structure."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._peak = _peak_bytes()

    def is_cheap(self) -> bool:
        took = time.process_time() - self._cpu_s
        return took <= READ_S and _peak_bytes() - self._peak <= READ_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _is_read_cheaply(compact: bool, order: Structure) -> bool:
    """Return whether guidance takes little time and memory. An array of 100 million items, in a
    request of 120 bytes, ended one worker after the other.
    """
    if order.kind == "structural_tag":
        return True  # guidance does not look into the schemas that vLLM gives it in tags
    reading = _Reading()
    wrong: object
    try:
        if order.kind == "json":
            defaults: Any = {"whitespace_flexible": not compact}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(order.text, defaults=defaults)
        else:
            grammar = llguidance.grammar_from(
                "regex" if order.kind == "regex" else "grammar", order.text
            )
        wrong = llguidance.LLMatcher.validate_grammar(grammar, None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = error
    is_cheap = reading.is_cheap()  # vLLM reads it again, if only to say what is wrong
    if is_cheap and not wrong:
        # Guidance itself bounds the next allowed tokens, for any vocabulary.
        llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    return is_cheap


def _slowest_mask(compiled: xgrammar.CompiledGrammar) -> float:
    """Return the most CPU seconds for one of the masks of an answer's first tokens."""
    matcher = xgrammar.GrammarMatcher(compiled)
    size = compiled.tokenizer_info.vocab_size
    mask = xgrammar.allocate_token_bitmask(1, size)
    random = Random(0)
    slowest = 0.0
    for _ in range(STEPS):
        # The second time without page faults, of which this process has many.
        slowest = max(slowest, min(_time(matcher, mask), _time(matcher, mask)))
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = bits[:size].nonzero()[0]
        if slowest > STEP_S or not len(allowed):
            break
        if not matcher.accept_token(int(random.choice(allowed))) or matcher.is_terminated():
            break
    return slowest


def _time(matcher: xgrammar.GrammarMatcher, mask: Any) -> float:
    began = time.thread_time()
    matcher.fill_next_token_bitmask(mask)
    return time.thread_time() - began


def _compile(
    compiler: xgrammar.GrammarCompiler, compact: bool, order: Structure
) -> xgrammar.CompiledGrammar:
    """Compile as vLLM's ``XgrammarBackend.compile_grammar`` does."""
    match order.kind:
        case "json":
            separators = (",", ":") if compact else None
            return compiler.compile_json_schema(
                order.text, any_whitespace=not compact, separators=separators
            )
        case "regex":
            return compiler.compile_regex(order.text)
        case "grammar":
            return compiler.compile_grammar(order.text)
        case "lark":
            return compiler.compile_lark(order.text)
        case "structural_tag":
            return compiler.compile_structural_tag(*_tag(order.text))
    raise ValueError(f"no kind of structure: {order.kind}")


def _read(order: Structure) -> xgrammar.Grammar:
    """Read a structure as vLLM does to validate it."""
    match order.kind:
        case "json":
            return xgrammar.Grammar.from_json_schema(order.text)
        case "regex":
            return xgrammar.Grammar.from_regex(order.text)
        case "grammar":
            return xgrammar.Grammar.from_ebnf(order.text)
        case "lark":
            return xgrammar.Grammar.from_lark(order.text)
        case "structural_tag":
            return xgrammar.Grammar.from_structural_tag(*_tag(order.text))
    raise ValueError(f"no kind of structure: {order.kind}")


def _tag(text: str) -> tuple[Any, ...]:
    """Return a tag as xgrammar takes it; older ones are items and their triggers."""
    tag = json.loads(text)
    if "structures" not in tag:
        return (text,)
    items = [
        xgrammar.StructuralTagItem(
            begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
        )
        for each in tag["structures"]
    ]
    return items, tag["triggers"]


def main(descriptor: int) -> None:
    """Compile for the frontend until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the frontend
    connection: Connection[bytes, Any] = Connection(descriptor)
    try:
        vocabulary: Vocabulary = connection.recv()
    except (EOFError, ConnectionError):
        return
    serve(connection, _trial(vocabulary), vocabulary.bounds)


def _trial(vocabulary: Vocabulary) -> Callable[[Structure], bytes]:
    if vocabulary.backend == "guidance":
        return partial(compile_by_guidance, vocabulary.compact)
    if vocabulary.backend == "outlines":
        # Takes seconds, which each child has none of.
        from vllm.v1.structured_output import backend_outlines  # noqa: F401

        return partial(compile_by_outlines, vocabulary.outlines)
    info = xgrammar.TokenizerInfo.deserialize_json(vocabulary.info)
    falls_back = vocabulary.backend == "auto"
    return partial(compile_by_xgrammar, info, vocabulary.compact, falls_back)


if __name__ == "__main__":
    main(int(sys.argv[1]))
