"""How long a frontend takes to join workers that hold a million blocks: ``bench_join`` says it."""

import importlib.util
import json
import subprocess
import sys

MODULE = "tests.benchmarks.bench_join"
FIGURE = "join_s_1m_blocks"


def join_seconds() -> dict[str, float | int | str | None]:
    """The figure, or None with a reason."""
    if importlib.util.find_spec(MODULE) is None:
        return {FIGURE: None, "join_reason": f"there is no {MODULE}"}
    ended = subprocess.run([sys.executable, "-m", MODULE], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        return {FIGURE: None, "join_reason": f"{MODULE} ended with status {ended.returncode}"}
    print(ended.stdout)
    return {FIGURE: json.loads(ended.stdout.splitlines()[-1])[FIGURE]}
