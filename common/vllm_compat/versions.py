"""Which versions of vLLM this is made for, and which one is here."""

from typing import Final

from vllm.version import __version__

SUPPORTED: Final = ("0.32.0", "0.33.0")
"""Those that this was built on and tested with. ``pyproject.toml`` installs nothing else."""

INSTALLED: Final[str] = __version__.partition("+")[0]
"""The version here, without the build's local part (``+cpu``)."""
