"""Programs in the clients' own environment, which ``make test`` prepares beside vLLM's."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.clients.programs.outcomes import Endpoint, Outcome

ROOT: Final = Path(__file__).parents[3]
BIN: Final = ROOT / ".venv-clients" / "bin"

ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the Internet for prices
    "LANGSMITH_TRACING": "false",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True)
class Report:
    """What a program did.

    Attributes:
        versions: of the clients.
        outcomes: of each call by name, at each endpoint by name.
    """

    versions: Mapping[str, str]
    outcomes: Mapping[str, Mapping[str, Outcome]]


def client_command(name: str) -> str:
    """A command of the clients' environment."""
    command = BIN / name
    if not command.exists():
        pytest.fail(f"{command} is not there: `make test` installs the clients")
    return str(command)


def run_program(name: str, endpoints: Mapping[str, Endpoint]) -> Report:
    """Run one of ``programs/`` in the clients' environment."""
    done = subprocess.run(
        [client_command("python"), "-m", f"tests.e2e.clients.programs.{name}"],
        input=json.dumps({at: asdict(endpoint) for at, endpoint in endpoints.items()}),
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Report(**json.loads(done.stdout.splitlines()[-1]))
