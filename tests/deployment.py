"""What the files below ``examples/deploy`` start, put to the parsers of the product."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest
from vllm import envs

from backend_worker import args as worker
from common import fleet_key
from common.cli.flag_settings import ENV_PREFIX
from frontend import args as frontend

ROOT: Final = Path(__file__).parents[1]
DEPLOY: Final = ROOT / "examples" / "deploy"

KEYS: Final = {"fleet.key": None, "api.keys": "user-key\n", "admin.keys": "admin-key\n"}
"""Files that a deployment mounts, and what is in them; the fleet key is made."""

OTHERS: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "HF_TOKEN",
        "HOME",
        "MODEL",  # of the deployment's own
        "PATH",
        "POD_NAME",  # read by discovery
        "POD_NAMESPACE",
        "POD_UID",
        "PYTHONUNBUFFERED",
        "TORCHDYNAMO_DISABLE",
    }
)
"""Variables that neither we nor vLLM declare."""

Parsed = frontend.FrontendArgs | worker.WorkerArgs


def make_keys(folder: Path, mode: int) -> None:
    """Key files as a deployment mounts them."""
    folder.mkdir(exist_ok=True)
    for name, text in KEYS.items():
        if text is None:
            fleet_key.new(folder / name)
        else:
            (folder / name).write_text(text)
        (folder / name).chmod(mode)


def unknown(names: Iterable[str]) -> list[str]:
    """Those variables that nothing of ours, of vLLM or of the deployment itself reads."""
    groups = {*worker.GROUPS, *frontend.GROUPS}
    ours = {group.variable(name) for group in groups for name in group.declared()}
    return sorted(set(names) - ours - set(envs.environment_variables) - OTHERS)


def parsed(
    argv: list[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Parsed:
    """What ``python -m argv[0]`` understands under an environment.

    Raises:
        SystemExit: a flag or a value that can't be.
    """
    for name in os.environ:
        if name.startswith((ENV_PREFIX, "DYNAMO_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    match argv:
        case ["frontend", *flags]:
            return frontend.parse(flags)
        case ["backend_worker", *flags]:
            return worker.parse(flags)
    raise ValueError(f"{argv[0]} is no program of ours")
