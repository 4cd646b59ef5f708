"""``python -m tests.gpu.kit.libraries DIRECTORY LIBRARY...``: what libraries need of a directory.

Prints the named libraries, and those below the directory that the dynamic loader takes for them.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_NEEDED: Final = re.compile(r"\(NEEDED\).*\[(.+)\]")


def needed(directory: Path, libraries: Iterable[Path]) -> set[Path]:
    """The libraries, and all that they need directly or not, as far as the directory has it."""
    named: defaultdict[str, list[Path]] = defaultdict(list)
    for path in directory.rglob("*.so*"):
        named[path.name].append(path)
    found: set[Path] = set()
    left = list(libraries)
    while left:
        library = left.pop()
        if library not in found:
            found.add(library)
            command = ["readelf", "--dynamic", str(library)]
            dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            left += [path for name in _NEEDED.findall(dynamic) for path in named[name]]
    return found


if __name__ == "__main__":
    print(*sorted(needed(Path(sys.argv[1]), map(Path, sys.argv[2:]))), sep="\n")
