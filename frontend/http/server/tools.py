"""Check tool and reasoning parsers at the start, and explain where their flags go."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from common.cli.flag_settings import unknown
from common.errors import ConfigurationError

_NO_AUTO_TOOLS: Final = "--enable-auto-tool-choice and --tool-call-parser to be set"
"""End of vLLM's refusal of a request with tools."""

_NO_PARSER: Final = "--tool-call-parser to be set"

_REMEDY: Final = (
    " at the frontend (mmrouter frontend, or FRONTEND_ARGS of the launch script), for example "
    "--enable-auto-tool-choice --tool-call-parser hermes; which parser a model needs is in "
    "docs/clients.md"
)


def check_parsers(args: Namespace) -> None:
    """Look up the parsers of vLLM's arguments.

    Raises:
        ConfigurationError: the parser or plug-in is unknown, or the tool parser has no effect.
    """
    if plugin := args.tool_parser_plugin:
        if ("/" in plugin or plugin.endswith(".py")) and not Path(plugin).is_file():
            raise ConfigurationError(f"--tool-parser-plugin: there is no file {plugin}")
        ToolParserManager.import_tool_parser(plugin)  # logs the faults of a plug-in
    tool_parser = args.tool_call_parser
    if tool_parser:
        _check("--tool-call-parser", tool_parser, ToolParserManager.list_registered())
        if not args.enable_auto_tool_choice:
            raise ConfigurationError(
                f"--tool-call-parser={tool_parser} does nothing without "
                "--enable-auto-tool-choice: add it, or requests with tools are refused"
            )
    if reasoning_parser := getattr(args, "reasoning_parser", None):
        _check("--reasoning-parser", reasoning_parser, ReasoningParserManager.list_registered())


def _check(flag: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ConfigurationError(f"{flag}: {unknown(name, known)} (there are {', '.join(known)})")


def say_where_tool_flags_go(app: FastAPI) -> None:
    """Have vLLM's refusals of requests with tools name the process that takes the flags."""
    chats = app.state.online_renderer
    answer: Callable[..., Any] = chats.create_error_response

    def with_remedy(message: object, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, str) and message.endswith((_NO_AUTO_TOOLS, _NO_PARSER)):
            message += _REMEDY
        return answer(message, *args, **kwargs)

    chats.create_error_response = with_remedy
