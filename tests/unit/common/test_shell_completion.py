"""What a real shell offers behind the two commands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli.known_flags import KnownFlags
from tests.by_version import since_033

NO = since_033("--disable-", "--no-enable-")
"""What vLLM shows; from 0.33 on it takes the older one too."""

BASH = shutil.which("bash")
ZSH = shutil.which("zsh")
COMMANDS = ("mmrouter-frontend", "mmrouter-worker")


def made(command: str, shell: str) -> str:
    known = KnownFlags.of(command.removeprefix("mmrouter-"))
    assert known is not None
    return known.scripts[shell]


@pytest.fixture(scope="module", params=COMMANDS)
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one command, for bash."""
    path: Path = tmp_path_factory.mktemp("completion") / request.param
    path.write_text(made(request.param, "bash"))
    return path


def offered(script: Path, *words: str, within: Path = Path("/")) -> list[str]:
    """The candidates for the last word."""
    command = script.name
    asked = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
    asked += f'_shtab_{command.replace("-", "_")}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", asked, "bash", script, command, *words],
        cwd=within,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_offers_flags_values_and_files(script: Path, tmp_path: Path) -> None:
    flags = set(offered(script, "--"))
    assert {"--discovery", "--fleet-key-file", "--version", "--completion"} <= flags
    assert offered(script, "--completion", "") == ["bash", "zsh"]
    (tmp_path / "fleet.key").touch()
    assert offered(script, "--fleet-key-file", "fl", within=tmp_path) == ["fleet.key"]
    if script.name == "mmrouter-frontend":
        assert {"--router-mode", "--tool-call-parser", NO + "log-requests"} <= flags
        assert offered(script, "--router-mode", "r") == ["round-robin"]
        assert not flags & {"--max-model-len", "--worker-id"}, "means nothing here"
    else:
        assert {"--worker-id", "--max-model-len", NO + "prefix-caching"} <= flags
        assert offered(script, "--dtype", "bfl") == ["bfloat16"]
        (tmp_path / "model").mkdir()
        assert offered(script, "mod", within=tmp_path) == ["model"]
        assert not flags & {"--port", "--router-mode"}, "means nothing here"


@pytest.mark.skipif(ZSH is None, reason="there is no zsh")
@pytest.mark.parametrize("command", COMMANDS)
def test_zsh_takes_it(command: str, tmp_path: Path) -> None:
    (tmp_path / f"_{command}").write_text(made(command, "zsh"))
    asked = f'fpath=("$1" $fpath); autoload -U compinit && compinit -u -D; print $_comps[{command}]'
    assert ZSH is not None
    done = subprocess.run(
        [ZSH, "-f", "-c", asked, "zsh", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"_{command}\n"
    path = tmp_path / f"_{command}"
    read = subprocess.run([ZSH, "-f", "-n", path], capture_output=True, text=True, timeout=60)
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("frontend", ["--completion"]), ("backend_worker", ["--completion", "csh"])],
)
def test_another_shell_is_refused_at_once(module: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.endswith("error: --completion takes one of bash, zsh\n")
