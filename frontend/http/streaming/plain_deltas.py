"""Text of a stream that no parser has to look at becomes a message without asking it.

A server with a tool parser has vLLM parse the streams of requests without tools too, and join all
tokens of an answer anew at each of them, though all that comes of it is the text that went in.
"""

from typing import Any, Final

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.abstract_parser import DelegatingParser

from frontend.http.streaming.stream_chunks import quick_message
from frontend.request import current_events

_parse: Final = DelegatingParser.parse_delta
_STEPS: Final = ("_in_reasoning_phase", "_in_tool_call_phase", "_extract_tool_calls_streaming")
_steps: Final = [getattr(DelegatingParser, step) for step in _STEPS]
_PLAIN: Final = "_mmrouter_plain"


def install() -> None:
    """Let all streams of this process be parsed so."""
    setattr(DelegatingParser, _parse.__name__, _parse_delta)


def _parse_delta(
    parser: DelegatingParser,
    delta_text: str,
    delta_token_ids: list[int],
    request: Any,
    prompt_token_ids: list[int] | None = None,
    *,
    finished: bool,
) -> DeltaMessage | None:
    """The first of a stream as vLLM does it, which looks at the prompt as well; then it is known
    how those after it go. Of the last one there may be more to say.
    """
    of_parser = vars(parser)
    if _PLAIN in of_parser and not finished:
        return quick_message(delta_text) if delta_text else None
    message = _parse(
        parser, delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
    )
    if _takes_text_as_it_is(parser, request):
        of_parser[_PLAIN] = True
        if (events := current_events.get()) is not None:
            events.parsed_as_it_is()
    return message


def _takes_text_as_it_is(parser: DelegatingParser, request: Any) -> bool:
    """Whether it will look neither for reasoning nor for calls of tools, at any token."""
    if request.tool_choice != "none" or not getattr(request, "include_reasoning", False):
        return False
    kind, state = type(parser), parser._stream_state
    return bool(
        parser._reasoning_parser is None
        and parser._tool_parser is not None
        and not state.engine_based
        and state.reasoning_ended
        and state.tool_call_text_started
        # Parsers of single models have steps of their own.
        and kind.parse_delta is _parse_delta
        and [getattr(kind, step) for step in _STEPS] == _steps
    )
