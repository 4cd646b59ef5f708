"""How a process of ours starts another: modules are found where they were found for itself."""

import sys
from pathlib import Path


def python_command(module: str) -> list[str]:
    """What runs a module. It is not looked for in the current directory unless this process looks
    there too, as ``python -m`` does and an installed command does not.
    """
    try:
        here = Path.cwd()
        looks_here = any(Path(path).absolute() == here for path in sys.path)
    except FileNotFoundError:  # the directory was removed
        looks_here = False
    return [sys.executable, *([] if looks_here else ["-P"]), "-m", module]
