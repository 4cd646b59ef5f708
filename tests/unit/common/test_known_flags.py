"""What commands say at once, without vLLM, is what their parsers would say seconds later."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import backend_worker.args
import frontend.args
from common.cli.command_line import FRONTEND, WORKER
from common.cli.known_flags import KnownFlags
from common.errors import ConfigurationError
from tests.e2e.processes import run_python

MODULES = {"frontend": "frontend", "worker": "backend_worker"}
NAMES = {"frontend": FRONTEND, "worker": WORKER}
PARSE: dict[str, Callable[[list[str]], object]] = {
    "frontend": frontend.args.parse,
    "worker": backend_worker.args.parse,
}


def ask(module: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *flags],
        env=os.environ | environ, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def known(command: str) -> KnownFlags:
    found = KnownFlags.of(command)
    assert found is not None
    return found


def fault(command: str, *flags: str, **environ: str) -> str | None:
    try:
        known(command).check(flags, NAMES[command], environ)
    except ConfigurationError as error:
        return str(error)
    return None


def test_the_files_are_made_from_this_vllm() -> None:
    done = run_python("-m", "setup.known_flags", "--check")
    assert done.returncode == 0, done.stdout[-1000:]


@pytest.mark.parametrize("module", MODULES.values())
@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--help"], 0, "needed first:"),
        (["model", "--help=all"], 0, "vLLM's own:"),
        (["--version"], 0, "(vLLM 0."),
        (["--completion", "bash"], 0, "complete -F"),
        (["--check-flags", "--log-format=json"], 0, "flags"),
        (["--fleet-key-fil=x"], 2, "did you mean --fleet-key-file?"),
        (["--log-format=xml"], 2, "--log-format='xml' is unusable: it is one of text, json"),
        (["--drain-timeout=-1"], 2, "--drain-timeout='-1' is unusable: Input should be greater"),
        (["--help=nothing"], 2, "--help takes nothing, or all"),
    ],
)
def test_it_answers_without_vllm(module: str, flags: list[str], status: int, says: str) -> None:
    done = ask(module, *flags)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, "msgspec" in imported) == (status, True), done.stderr[-1000:]
    assert says in done.stdout + done.stderr.splitlines()[-1]
    assert not imported & {"vllm", "torch", "transformers"}


def test_the_help_is_short_and_has_units() -> None:
    for command in MODULES:
        assert len(known(command).help.splitlines()) < 60
        assert "VALUE" not in known(command).help_all
    assert "--drain-timeout SECONDS" in known("frontend").help_all
    assert "--max-body-mb MiB" in known("frontend").help_all


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("frontend", "--prot"),
        ("frontend", "--max-model-len=5"),
        ("frontend", "--worker-id=w"),
        ("frontend", "--grpc"),
        ("worker", "--port=1"),
        ("worker", "--chat_template=x"),
        ("worker", "--max-model-length=1"),
        ("worker", "--kv-transfer-config.nothing_like_it.=1"),
        ("worker", "--compilation-confi.level=3"),
    ],
)
def test_it_says_what_the_parser_says(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["/"] if command == "worker" else []
    with pytest.raises(SystemExit):
        PARSE[command]([*model, flag])
    later = capsys.readouterr().err
    sentence = fault(command, *model, flag)
    if flag == "--chat_template=x":
        later = later.replace("chat_template", "chat-template")
    assert sentence is None or f"error: {sentence}\n" in later
    assert (sentence is None) == (flag.partition(".")[0] in known(command).flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--http-port", "8000", "-asc", "2", "--router_mode=kv", "--policy=cache_aware"],
        ["--check", "--log-level=INFO"],
        ["--no-nvtx", "--no-enable-log-requests"],
        ["--chat-template={{ messages }}", "--", "--anything"],
        ["--default-chat-template-kwargs.enable_thinking=false"],
    ],
)
def test_what_a_frontend_takes_is_known(flags: list[str]) -> None:
    assert fault("frontend", *flags) is None


def test_a_choice_in_the_environment() -> None:
    sentence = "MMROUTER_ROUTER_MODE='kvv' is unusable: it is one of kv, round-robin"
    assert fault("frontend", MMROUTER_ROUTER_MODE="kvv") == sentence
    assert fault("frontend", MMROUTER_ROUTER_MODE="") is None
    assert fault("frontend", "--router-mode=kv", MMROUTER_ROUTER_MODE="kvv") is None


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        (["--max-inflight=0"], {}, "--max-inflight='0' is unusable: "),
        (["--max-inflight", "many"], {}, "--max-inflight='many' is unusable: "),
        (["--max-concurrent-requests=0"], {}, "--max-inflight='0' is unusable: "),
        ([], {"MMROUTER_MAX_INFLIGHT": "1.5"}, "MMROUTER_MAX_INFLIGHT='1.5' is unusable: "),
        (["--max-inflight=3"], {"MMROUTER_MAX_INFLIGHT": "0"}, None),
    ],
)
def test_a_number_is_refused_as_by_its_settings(
    flags: list[str], environ: dict[str, str], says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = fault("frontend", *flags, **environ)
    if says is None:
        assert sentence is None
        return
    assert sentence is not None and sentence.startswith(says)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        for name, value in environ.items():
            patch.setenv(name, value)
        frontend.args.parse(flags)
    assert f"error: {sentence}\n" in capsys.readouterr().err


def test_a_port_that_there_is_not() -> None:
    for port in ("65536", "x", "-1"):
        sentence = fault("frontend", f"--port={port}")
        assert sentence is not None and sentence.startswith(f"--port={port!r} is unusable: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-inflight: 0", "max-inflight=0 is unusable: "),
        ("max-inflight: 8", None),
        ("port: 8000\nrouter_mode: kv\nhttp-host: localhost", None),
        ("prot: 8000", "prot is unknown; did you mean port?"),
        ("max-model-len: 5", "max-model-len means nothing here: "),
        ("- port", "must have a key for each flag"),
        ("asc: 2", None),
    ],
)
def test_keys_of_a_file(tmp_path: Path, text: str, says: str | None) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text(text)
    for sentence in (
        fault("frontend", "--config", str(file)),
        fault("frontend", MMROUTER_CONFIG=str(file)),
    ):
        if says is None:
            assert sentence is None
        else:
            assert sentence is not None and says in sentence and str(file) in sentence


def test_flags_of_a_platform_that_is_not_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plug-in may add some, of which the files know nothing."""
    monkeypatch.setattr("common.cli.known_flags.entry_points", lambda group: [group])
    assert fault("worker", "--of-another-device=1") is None
    assert "means nothing here" in str(fault("worker", "--port=1"))


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_parser_that_does_not_exist(flag: str) -> None:
    said = fault("frontend", flag, "hermess" if "tool" in flag else "qwen33")
    assert said is not None and said.startswith(f"{flag}: ") and "did you mean" in said
    assert fault("frontend", f"{flag}={'hermes' if 'tool' in flag else 'qwen3'}") is None
    plugin = "--tool-parser-plugin=mine.py"
    assert fault("frontend", plugin, f"{flag}=mine") is None, "the plug-in may have it"
