"""Commands of the pages name targets, modules, scripts and flags that exist.

Others run them: ``curl`` lines and the quickstart in ``tests/e2e``, Kubernetes' in ``deploy``.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache

from common.cli.known_flags import KnownFlags
from common.cli.mmrouter import MODULES
from common.launcher.options import OPTIONS
from setup.links import ROOT, pages

FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = {"python", "python3", ".venv/bin/python"}
OF_A_PROCESS = {
    "frontend": "frontend",
    "backend_worker": "worker",
    "mmrouter-frontend": "frontend",
    "mmrouter-worker": "worker",
    "doctor": "frontend",
    "worker": "worker",
    "up": "",
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each page, with the words of each command of its blocks, variables before it left out."""
    for page in pages():
        for block in FENCE.findall(page.read_text()):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                words = (
                    shlex.split(line, comments=True) if line.count("'") % 2 == 0 else line.split()
                )
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield str(page.relative_to(ROOT)), words


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def flags(process: str) -> frozenset[str]:
    if process == "up":
        return flags("frontend") | flags("worker") | frozenset(OPTIONS)
    known = KnownFlags.of(OF_A_PROCESS[process])
    assert known is not None
    return known.flags


def test_each_target_of_make_exists() -> None:
    named = {word for _, words in commands() if words[0] == "make" for word in words[1:2]}
    assert len(named) > 3
    assert {name for name in named if "=" not in name} <= targets()
    for page in pages():
        quoted = set(re.findall(r"`make ([a-z][a-z-]*)", page.read_text()))
        assert quoted <= targets() | {"bench-"}, page


def test_each_module_exists() -> None:
    named = {words[2] for _, words in commands() if words[0] in PYTHON and words[1:2] == ["-m"]}
    assert "examples.scale" in named
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def test_each_command_of_mmrouter_exists() -> None:
    named = {words[1] for _, words in commands() if words[0].rpartition("/")[2] == "mmrouter"}
    assert {"frontend", "worker", "up", "fleet-key"} <= named <= {*MODULES}


def test_each_script_exists() -> None:
    named = {
        word
        for _, words in commands()
        for word in words[:2]
        if re.fullmatch(r"(?:examples|setup|tests)/[\w./-]+\.(?:py|sh)", word)
    }
    assert len(named) > 2
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_each_flag_of_a_process_exists() -> None:
    seen = 0
    for page, words in commands():
        module = words[0] in PYTHON and words[1:2] == ["-m"]
        at = 2 if module else int(words[0].rpartition("/")[2] == "mmrouter")
        process = words[at].rpartition("/")[2]
        if process in OF_A_PROCESS:
            for word in words[at:]:
                if re.match(r"--[a-z]", word):
                    seen += 1
                    name = word.partition("=")[0].partition(".")[0]
                    assert name in flags(process) | {"--completion", "--check"}, (page, words)
    assert seen > 20
