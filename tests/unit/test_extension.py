"""The example of a package that extends mmrouter, installed; and packages that are wrong."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from common.errors import ConfigurationError
from common.extensions import MEDIA_RULES, ROUTER_MODES, names_of
from common.identity import WorkerId
from frontend.fetch.http import HttpFetcher
from frontend.fetch.settings import MediaSettings
from frontend.media_limits import RefusedError
from frontend.router import Router, RouterSettings
from tests.fakes.routing import prompt, request, worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed, and nothing else."""
    folder, copy = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "mmrouter_extension.py"):  # a build leaves files at its source
        (copy / name).write_bytes((ROOT / "examples" / "extension" / name).read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(folder), str(copy)]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("mmrouter_extension", None)


def package(
    place: Path, group: str, value: str, name: str = "other", entry: str = "fewest-requests"
) -> None:
    """Another package with an entry point, as an installer leaves it."""
    facts = place / f"{name}-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{entry} = {value}\n")
    invalidate_caches()


def media(*flags: str) -> MediaSettings:
    parser = argparse.ArgumentParser()
    MediaSettings.add_arguments(parser)
    serve = argparse.Namespace(allowed_media_domains=None, allowed_local_media_path="")
    return MediaSettings.with_vllms(parser.parse_args(flags), serve, {})


async def test_its_mode_routes(installed: Path) -> None:
    router = Router(RouterSettings(mode="fewest-requests"), seed=1)
    for name in ("a", "b", "c"):
        await router.roster.add(worker(name))
    decisions = [router.route(request(prompt(1))) for _ in range(6)]
    assert {one.mode for one in decisions} == {one.reason for one in decisions}
    assert decisions[0].mode == "fewest-requests"
    for three in (decisions[:3], decisions[3:]):  # in least cost all would follow the first
        assert {one.worker_id for one in three} == {WorkerId(name) for name in "abc"}
    await router.close()


async def test_its_rule_holds_beside_the_policy(installed: Path) -> None:
    fetcher = HttpFetcher(media("--media-allow-private"))
    with pytest.raises(RefusedError, match="only https addresses"):
        await fetcher.fetch("http://127.0.0.1:9/picture.png", 100)
    await fetcher.close()
    with pytest.raises(RefusedError, match="not public"):
        fetcher = HttpFetcher(media())
        await fetcher.fetch("https://127.0.0.1:9/picture.png", 100)
    await fetcher.close()


@pytest.mark.parametrize("there", [True, False])
def test_the_command_line_knows_its_mode(folder: Path, there: bool) -> None:
    path = os.pathsep.join([str(ROOT), *([str(folder)] if there else [])])
    done = subprocess.run(
        [sys.executable, "-m", "frontend", "--router-mode=fewest-requests", "--check-flags"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (0 if there else 2), done.stderr
    assert there or "it is one of kv, round-robin" in done.stderr


def test_a_mode_may_have_capitals(tmp_path: Path) -> None:
    package(tmp_path, ROUTER_MODES, "os:fspath", entry="Fewest")
    done = subprocess.run(
        [sys.executable, "-m", "frontend", "--router-mode=Fewest", "--check-flags"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_without_packages_there_is_nothing() -> None:
    assert names_of(ROUTER_MODES) == names_of(MEDIA_RULES) == []
    with pytest.raises(ValueError, match="did you mean kv"):
        RouterSettings(mode="kvv")


def test_two_packages_with_one_name(installed: Path, tmp_path: Path) -> None:
    package(tmp_path, ROUTER_MODES, "os:fspath")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ConfigurationError, match="mmrouter-extension and other both have"):
            RouterSettings(mode="fewest-requests")
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nowhere:Mode", r"of other .* can't be imported: ModuleNotFoundError"),
        ("os:nothing", r"can't be imported: AttributeError"),
        ("os:fspath", r"is no subclass of RouterMode"),
    ],
)
def test_a_package_that_is_wrong(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, ROUTER_MODES, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=said):
        RouterSettings(mode="fewest-requests")
