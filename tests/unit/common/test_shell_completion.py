"""What real shells offer behind ``mmrouter`` and its old names."""

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli.known_flags import SHELLS, table_file
from common.cli.mmrouter import MODULES
from setup.completion import OF_STATUS
from tests.by_version import since_033

NO = since_033("--disable-", "--no-enable-")
"""What vLLM shows; from 0.33 on it takes the older one too."""

BASH, ZSH, FISH = map(shutil.which, ("bash", "zsh", "fish"))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one for each shell."""
    path: Path = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        shutil.copy(table_file("mmrouter", shell), path / shell)
    return path


def offered(scripts: Path, *words: str, within: Path = Path("/")) -> list[str]:
    """The candidates for the last word, in bash."""
    asked = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mmrouter; '
    asked += 'printf "%s\\n" "${COMPREPLY[@]}"'
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", asked, "bash", scripts / "bash", *words],
        cwd=within,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_offers_commands_flags_values_and_files(scripts: Path, tmp_path: Path) -> None:
    assert {*MODULES} <= {*offered(scripts, "mmrouter", "")}
    assert offered(scripts, "mmrouter", "front") == ["frontend"]
    (tmp_path / "my fleet.key").touch()
    (tmp_path / "model").mkdir()
    for names in (["mmrouter", "frontend"], ["mmrouter-frontend"], ["/opt/bin/mmrouter", "doctor"]):
        flags = {*offered(scripts, *names, "--")}
        assert {"--router-mode", "--tool-call-parser", NO + "log-requests", "--help"} <= flags
        assert not flags & {"--max-model-len", "--worker-id"}, "means nothing here"
        assert offered(scripts, *names, "--port", "80", "--router-mode", "r") == ["round-robin"]
        assert offered(scripts, *names, "--router-mode", "=", "r") == ["round-robin"]
        assert {"kv", "round-robin"} <= {*offered(scripts, *names, "--router-mode", "=")}
        assert offered(scripts, *names, "--completion", "") == [*SHELLS]
        key = offered(scripts, *names, "--fleet-key-file", "my", within=tmp_path)
        assert key == ["my fleet.key"]
    for names in (["mmrouter", "worker"], ["mmrouter-worker"]):
        flags = {*offered(scripts, *names, "--")}
        assert {"--worker-id", "--max-model-len", NO + "prefix-caching"} <= flags
        assert not flags & {"--port", "--router-mode"}, "means nothing here"
        assert offered(scripts, *names, "--dtype", "bfl") == ["bfloat16"]
        assert offered(scripts, *names, "mod", within=tmp_path) == ["model"]
    both = {*offered(scripts, "mmrouter", "up", "--")}
    assert {"--workers", "--run-dir", "--port", "--max-model-len", "--router-mode"} <= both
    assert offered(scripts, "mmrouter", "up", "mod", within=tmp_path) == ["model"]
    assert offered(scripts, "mmrouter", "fleet-key", "") == ["new"]
    assert offered(scripts, "mmrouter", "nonsense", "--") == []


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes_by_tab(scripts: Path, tmp_path: Path) -> None:
    assert BASH is not None
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(BASH, [BASH, "--norc", "--noprofile", "-i"], {"PS1": "$ ", "TERM": "dumb"})
    called = tmp_path / "called"
    lines = f"source {scripts / 'bash'}; mmrouter() {{ echo $* > {called}; exit; }}\n"
    lines += "mmrouter wor\tmodel --dtype bfl\t--max-model-le\t5\n"
    os.write(terminal, lines.encode())
    with contextlib.suppress(OSError):  # the shell has ended
        while os.read(terminal, 65536):
            pass
    os.close(terminal)
    os.waitpid(pid, 0)
    assert called.read_text() == "worker model --dtype bfloat16 --max-model-len 5\n"


@pytest.mark.skipif(ZSH is None, reason="there is no zsh")
def test_zsh_takes_it(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "_mmrouter").write_text((scripts / "zsh").read_text())
    asked = 'fpath=("$1" $fpath); autoload -U compinit && compinit -u -D; print $_comps[mmrouter]'
    assert ZSH is not None
    done = subprocess.run(
        [ZSH, "-f", "-c", asked, "zsh", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "_mmrouter\n", "")
    read = subprocess.run([ZSH, "-f", "-n", scripts / "zsh"], capture_output=True, timeout=60)
    assert (read.returncode, read.stderr) == (0, b"")


@pytest.mark.skipif(FISH is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("mmrouter fron", "frontend"),
        ("mmrouter frontend --router-mode r", "round-robin"),
        ("mmrouter-worker --max-model-le", "--max-model-len"),
        ("mmrouter up --worke", "--workers"),
    ],
)
def test_fish_offers(scripts: Path, line: str, offers: str) -> None:
    assert FISH is not None
    asked = f"source {scripts / 'fish'}; complete -C '{line}'"
    done = subprocess.run([FISH, "--no-config", "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert offers in {each.partition("\t")[0] for each in done.stdout.splitlines()}


def test_each_flag_of_status_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "common.launcher.status", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert all(flag in said for flag in OF_STATUS)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("common.cli.mmrouter", ["--completion", "csh"]),
        ("frontend", ["--completion"]),
        ("backend_worker", ["--completion", "csh"]),
    ],
)
def test_another_shell_is_refused_at_once(module: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.endswith("error: --completion takes one of bash, zsh, fish\n")
