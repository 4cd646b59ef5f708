"""The demo: a tiny random model that is made where it is needed, with the flags that suit it."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from common.errors import ConfigurationError

_ROOT: Final = Path(__file__).parents[2]
_MAKER: Final = _ROOT / "examples" / "demo_model.py"
MODEL: Final = _ROOT / ".demo-model"

# Its answers are noise without an end, so they are cut where a client names no limit. Chat programs
# send tools with every message: the parser is the one for the calls of its chat template.
WORKER_FLAGS: Final = (
    "--served-model-name=demo",
    '--override-generation-config={"max_new_tokens": 256}',
)
FRONTEND_FLAGS: Final = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--tool-strict-level=parameter",
)


def model_of(flags: dict[str, list[str]]) -> str:
    """Return the demo's directory, and put its flags before those that were given.

    Raises ConfigurationError: this is no checkout of the repository.
    """
    if not _MAKER.exists():
        raise ConfigurationError(
            "name a model: mmrouter up MODEL. The demo's is made by a script of the repository, "
            "which is not here"
        )
    flags["worker"][:0] = WORKER_FLAGS
    flags["frontend"][:0] = FRONTEND_FLAGS
    return str(MODEL)


def make(model: str) -> None:
    """Make the model if it is the demo's and is not there.

    Raises ConfigurationError: that failed.
    """
    if model != str(MODEL):
        return
    done = subprocess.run([sys.executable, str(_MAKER), model], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ConfigurationError(f"the demo's model could not be made in {model}: see above")
