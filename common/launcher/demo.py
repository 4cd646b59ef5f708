"""The demo: a tiny random model that is made on demand, and its flags."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from common.errors import ConfigurationError

_ROOT: Final = Path(__file__).parents[2]
_MAKER: Final = _ROOT / "examples" / "demo_model.py"
MODEL: Final = _ROOT / ".demo-model"

# Its answers are endless noise, so they are cut where a client sets no limit. Chat programs send
# tools with every message: the parser matches the chat template's calls.
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
    """Return the demo's directory, with its flags. Raises ConfigurationError: no repository."""
    if not _MAKER.exists():
        raise ConfigurationError(
            "name a model: mmrouter up MODEL. The demo's is made by a script of the repository, "
            "which is not here"
        )
    flags["worker"][:0] = WORKER_FLAGS
    flags["frontend"][:0] = FRONTEND_FLAGS
    return str(MODEL)


def make(model: str) -> None:
    """Make the demo's model if it is missing. Raises ConfigurationError: that failed."""
    if model != str(MODEL):
        return
    done = subprocess.run([sys.executable, str(_MAKER), model], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ConfigurationError(f"the demo's model could not be made in {model}: see above")
