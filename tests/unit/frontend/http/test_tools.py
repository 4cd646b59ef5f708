"""Parsers of tools are looked up at the start, and a refusal of tools says where flags go."""

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.renderers.online_renderer import OnlineRenderer

from common.errors import ConfigurationError
from frontend.args import parse
from frontend.http.server.tools import check_parsers, say_where_tool_flags_go


def arguments(**changes: object) -> Namespace:
    said = {"tool_parser_plugin": "", "tool_call_parser": None, "enable_auto_tool_choice": False}
    return Namespace(**said | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"enable_auto_tool_choice": True, "tool_call_parser": "hermess"},
            r"--tool-call-parser: hermess is unknown; did you mean hermes\? \(there are .*hermes",
        ),
        ({"tool_call_parser": "nothing like it"}, "--tool-call-parser: nothing like it is unknown"),
        ({"tool_call_parser": "hermes"}, "does nothing without --enable-auto-tool-choice: add it"),
        ({"tool_parser_plugin": "/no/such.py"}, "there is no file /no/such.py"),
        ({"reasoning_parser": "qwen33"}, "--reasoning-parser: qwen33 is unknown"),
    ],
)
def test_what_can_t_be(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_parsers(arguments(**changes))


def test_what_can_be() -> None:
    check_parsers(arguments())
    check_parsers(arguments(enable_auto_tool_choice=True, tool_call_parser="hermes"))
    check_parsers(arguments(reasoning_parser="qwen3"))


def test_the_parsers_that_the_page_names_exist() -> None:
    page = Path(__file__).parents[4] / "docs" / "clients.md"
    (about,) = re.findall(r"\*\*Which parser\*\*(.*?)\n- ", page.read_text(), re.S)
    named = set(re.findall(r"`(\w+)`", about))
    assert len(named) > 5
    for name in named:
        check_parsers(arguments(enable_auto_tool_choice=True, tool_call_parser=name))


def test_the_command_line_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--enable-auto-tool-choice", "--tool-call-parser=hermess"])
    assert "did you mean hermes?" in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_request_with_tools_learns_where_the_flags_go(choice: str) -> None:
    """By vLLM's own code, whose words are looked for: it fails here if they change."""
    renderer: Any = OnlineRenderer.__new__(OnlineRenderer)
    renderer.renderer = SimpleNamespace(tokenizer=None)
    renderer.parser = None
    renderer.use_harmony = False
    renderer.enable_auto_tools = False
    app = FastAPI()
    app.state.online_renderer = renderer
    say_where_tool_flags_go(app)
    request: Any = SimpleNamespace(tool_choice=choice, tools=[])
    refused: Any = await renderer.render_chat(request)
    assert refused.error.code == 400
    assert refused.error.message.endswith(
        "to be set at the frontend (mmrouter frontend, or FRONTEND_ARGS of the launch script), "
        "for example --enable-auto-tool-choice --tool-call-parser hermes; which parser a model "
        "needs is in docs/clients.md"
    )
    other = renderer.create_error_response("another")
    assert other.error.message == "another"
