"""Every flag of ``vllm serve`` works, or is refused by name with the reason, at both processes."""

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm

from backend_worker import args as worker
from common.cli import command_line as flag_aliases
from common.cli import vllm_flags
from common.cli.command_line import flags_of
from common.cli.flag_settings import ConfigFile
from common.cli.vllm_command_line import VllmParser, read_vllms
from common.errors import ConfigurationError
from common.vllm_compat import engine_arguments
from common.vllm_compat.features import server_arguments
from frontend import args as frontend
from setup.vllm_map import ROOT
from tests.by_version import NOT_HERE

pytestmark = pytest.mark.filterwarnings("ignore:--log-config-file is deprecated")

READ_BEFORE = {
    *("config", "api_server_count", "log_level", "otlp_traces_endpoint"),
    *("trust_remote_code", "shutdown_timeout"),
}
"""By our own parser, or as another name of ours."""

SAMPLES = ("1", "0.5", "x", "{}", "[]", '["x"]', "a=b", "auto", "int8", "1,2", "0-1")

Refusal = Callable[[str], str | None]


def parser_of(groups: tuple[object, ...], refusal: Refusal, *, server: bool) -> VllmParser:
    parser = VllmParser("test", flags_of(groups), refusal)  # type: ignore[arg-type]
    if server:
        server_arguments().make_arg_parser(parser)
    else:
        parser.add_argument("model_tag", nargs="?")
        worker.add_vllms(parser)
    return parser


@pytest.fixture(scope="module")
def at_frontend() -> VllmParser:
    return parser_of(frontend.GROUPS, vllm_flags.refusal_at_frontend, server=True)


@pytest.fixture(scope="module")
def at_worker() -> VllmParser:
    return parser_of(worker.GROUPS, vllm_flags.refusal_at_worker, server=False)


def names(parser: VllmParser) -> set[str]:
    return {action.dest for action in parser._actions} - {"help"}


def words_for(parser: VllmParser, action: argparse.Action) -> list[str]:
    """Something that the flag takes."""
    flag = next(iter(sorted(action.option_strings, key=len, reverse=True)), "")
    if not flag:
        return ["x"]
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return [action.option_strings[0]]
    for sample in (*map(str, action.choices or ()), *SAMPLES):
        try:
            parser.given([flag, sample])
        except (ConfigurationError, TypeError, ValueError):
            continue
        return [flag, sample]
    raise AssertionError(f"no sample fits {flag}")


def each(parser: VllmParser, server: set[str] | None = None) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.dest not in READ_BEFORE | {"help"} and (server is None or action.dest in server):
            yield action


def test_every_flag_is_in_one_place(at_frontend: VllmParser, at_worker: VllmParser) -> None:
    server = names(at_frontend) - (names(at_worker) - {"model_tag"})
    listed = vllm_flags.SERVER.keys() | vllm_flags.SERVER_REFUSED.keys()
    assert listed - NOT_HERE == server
    assert not vllm_flags.SERVER.keys() & vllm_flags.SERVER_REFUSED.keys()
    assert vllm_flags.ENGINE_AT_FRONTEND.keys() <= names(at_worker)
    assert vllm_flags.SERVER_AT_WORKER.keys() <= names(at_frontend) & names(at_worker)
    assert engine_arguments.IDLE.keys() <= engine_arguments.IRRELEVANT.keys()


def test_what_is_read_before_is_a_flag_of_ours_or_an_alias() -> None:
    ours = flags_of(frontend.GROUPS) | flag_aliases.FRONTEND.aliases.keys()
    assert {f"--{name.replace('_', '-')}" for name in READ_BEFORE} <= ours


def test_a_frontend_takes_a_flag_or_says_why_not(at_frontend: VllmParser) -> None:
    for action in each(at_frontend):
        check(at_frontend, action, words_for(at_frontend, action))


def test_a_worker_takes_a_flag_or_says_why_not(at_worker: VllmParser) -> None:
    for action in each(at_worker):
        check(at_worker, action, words_for(at_worker, action))


def check(parser: VllmParser, action: argparse.Action, words: list[str]) -> None:
    reason = parser.refusal(action.dest)
    if reason is None:
        _, given = read_vllms(parser, words, None)
        assert action.dest in given, words
        return
    assert len(reason) > 10
    with pytest.raises(ConfigurationError) as caught:
        read_vllms(parser, words, None)
    flag = f"--{action.dest.replace('_', '-')}" if action.option_strings else "MODEL"
    assert str(caught.value) == f"{flag} means nothing here: {reason}"


def test_a_worker_knows_the_servers_flags_and_says_whose_they_are(
    at_frontend: VllmParser, at_worker: VllmParser
) -> None:
    for action in each(at_frontend, names(at_frontend) - names(at_worker)):
        words = words_for(at_frontend, action)
        with pytest.raises(ConfigurationError, match=r" means nothing here: .{10}") as caught:
            read_vllms(at_worker, words, None)
        assert words[0] in str(caught.value)


def test_what_works_at_a_frontend_is_read_by_something_that_runs_there() -> None:
    """Not by what vLLM's own launcher does, which we have in its place."""
    entrypoints = Path(vllm.__file__).parent / "entrypoints"
    parser = Path(server_arguments().__file__ or "")
    left_out = ("launchers/api_server/entry.py", "launchers/launcher.py", parser.as_posix())
    files = [
        *(
            file
            for file in entrypoints.rglob("*.py")
            if not file.as_posix().endswith((*left_out, "dp_supervisor.py", "grpc_server.py"))
            and "cli" not in file.relative_to(entrypoints).parts
        ),
        *(ROOT / "frontend").rglob("*.py"),
        parser,
    ]
    text = "\n".join(file.read_text() for file in files[:-1])
    # The defaults that requests have are made there.
    text += files[-1].read_text().partition("def resolve_default_chat_template_kwargs")[2]
    read = set(re.findall(r"\b(?:args|serve)\.(\w+)|\bgetattr\([\w.\s]+,\s*\"(\w+)\"", text))
    words = {word for pair in read for word in pair}
    assert vllm_flags.SERVER.keys() - READ_BEFORE - words - NOT_HERE == set()


def test_no_alias_hides_a_flag_of_vllms(at_frontend: VllmParser, at_worker: VllmParser) -> None:
    theirs = set(at_frontend._option_string_actions) | flags_of(frontend.GROUPS)
    aliases = {"--api-server-count", "-asc", "--shutdown-timeout"}
    assert theirs & flag_aliases.FRONTEND.aliases.keys() == aliases
    ours = {flag for alias in flag_aliases.FRONTEND.aliases.values() for flag in alias.flags}
    assert ours <= theirs
    assert set(at_worker._option_string_actions) & flag_aliases.WORKER.aliases.keys() == {
        "--shutdown-timeout"
    }


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--tool-call-parsr", "--tool-call-parser"),
        ("--router-mod", "--router-mode"),
        ("--max-inflght=5", "--max-inflight"),
    ],
)
def test_the_nearest_of_an_unknown_flag_is_told(
    at_frontend: VllmParser, word: str, near: str
) -> None:
    name = word.partition("=")[0]
    with pytest.raises(ConfigurationError, match=f"^{name} is unknown; did you mean {near}\\?$"):
        read_vllms(at_frontend, [word], None)


def file_of(**values: object) -> ConfigFile:
    return ConfigFile(Path("f.yaml"), {key.replace("_", "-"): v for key, v in values.items()})


def test_a_short_flag_of_vllms_is_named_in_full_for_a_file(at_worker: VllmParser) -> None:
    sentence = "f.yaml: tp is unknown; did you mean tensor-parallel-size?"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(sentence)}$"):
        read_vllms(at_worker, [], file_of(tp=2))


@pytest.mark.parametrize("value", [False, {"a": 1}, [1]])
def test_no_flag_takes_another_kind_of_value_for_text(
    at_frontend: VllmParser, at_worker: VllmParser, value: object
) -> None:
    for parser in (at_frontend, at_worker):
        for action in each(parser):
            if not action.option_strings or action.nargs in ("+", "*", 0):
                continue
            key = max(action.option_strings, key=len).removeprefix("--")
            with contextlib.suppress(ConfigurationError, TypeError, ValueError):
                _, given = read_vllms(parser, [], ConfigFile(Path("f.yaml"), {key: value}))
                assert not isinstance(given[action.dest].value, str), key


def test_vllms_flags_may_stand_in_the_file(at_frontend: VllmParser) -> None:
    file = file_of(
        port=81,
        enable_auto_tool_choice=True,
        enable_log_deltas=False,
        tool_call_parser="hermes",
        allowed_origins=["https://a"],
        api_key=["one", "two"],
        middleware=["a.b"],
        default_chat_template_kwargs={"thinking": True},
        root_path=None,
        router_mode="kv",  # ours
    )
    args, given = read_vllms(at_frontend, ["--port=82", "--middleware=c.d"], file)
    assert (args.port, args.middleware, args.root_path) == (82, ["c.d"], None)
    assert args.enable_auto_tool_choice is True and args.enable_log_deltas is False
    assert (args.tool_call_parser, args.api_key) == ("hermes", ["one", "two"])
    assert args.allowed_origins == ["https://a"]
    assert args.default_chat_template_kwargs == {"thinking": True}
    assert (given["port"].layer, given["api_key"].layer) == ("flag", "file")
    assert "router_mode" not in given and "root_path" not in given


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"prot": 8000}, "prot is unknown; did you mean port?"),
        ({"router_mod": "kv"}, "router-mod is unknown; did you mean router-mode?"),
        ({"as": 2}, "as is unknown"),
        ({"asc": 2}, "asc is unknown; did you mean api-server-count?"),
        ({"ssl_certfile": False}, "ssl-certfile=False is unusable: it takes text"),
        ({"host": {"a": 1}}, "host={'a': 1} is unusable: it takes text"),
        ({"uds": ["a"]}, "uds=['a'] is unusable: it takes text"),
        ({"api_key": ["a", False]}, "api-key=*** is unusable: it takes text"),
        ({"port": "many"}, "port='many' is unusable: argument --port: "),
        ({"logging_config": {"a": 1}}, "logging-config={'a': 1} is unusable: argument --logging"),
        ({"config.x": 1}, "config.x must be written in full, and has no fields"),
        ({"port": True}, "port=True is unusable: argument --port: "),
        ({"port": None, "grpc": 5}, "grpc=5 is unusable: it is either true or false"),
        ({"max_model_len": 5}, "max-model-len means nothing here: frontends learn it"),
        ({"grpc": True}, "grpc means nothing here: the frontend speaks HTTP only"),
        ({"no_enable_log_deltas": True}, "no-enable-log-deltas=True is unusable: write enable-log"),
        ({"uvicorn_log_level": "loud"}, "uvicorn-log-level='loud' is unusable: "),
        ({"apikey": "secret"}, "apikey is unknown; did you mean api-key?"),
    ],
)
def test_a_wrong_key_of_vllms_is_one_sentence(
    at_frontend: VllmParser, values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_vllms(at_frontend, [], file_of(**values))
    assert str(caught.value).startswith(f"f.yaml: {complaint}")
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
