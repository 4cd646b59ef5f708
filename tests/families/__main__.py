"""Holds every model family against a plain vLLM.

    python -m tests.families [--page FILE] [--results DIRECTORY] [--again] [CASE ...]

Each case starts a worker, three frontends whose media travel in another way each, and a plain vLLM
of one tiny model, and asks all of them the same. A case that has a result already is not run again,
so a run can be stopped and continued. Ends with one line of JSON; exit status 1 if anything
differs.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.families import page
from tests.families.catalog import CASES, registry
from tests.families.results import Result, read, summary, write
from tests.families.run import run

RESULTS = Path(".runs/families")


def verdict(result: Result) -> str:
    """One line for a case, and one for each thing that differs."""
    if result.unbuilt:
        return f"not built: {result.unbuilt}"
    lines = [f"{len(result.answers)} answers, {len(result.differing)} differ, index {result.index}"]
    lines += [f"BROKEN {result.broken}"] if result.broken else []
    for answer in result.differing:
        what = "; ".join(answer.differs)
        lines.append(f"DIFFERS {answer.way}, {answer.question}: {what}")
    return "\n    ".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all unless given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="one file for each case")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--keep", type=Path, help="where models and logs are left")
    parser.add_argument("--list", action="store_true", help="say which cases there are")
    parser.add_argument("--page", type=Path, help="write what came out")
    parser.add_argument("--dry", action="store_true", help="run nothing more")
    options = parser.parse_args()
    cases = {name: CASES[name] for name in options.cases} or CASES
    if options.list:
        print("\n".join(CASES))
        return 0
    for number, (name, case) in enumerate(cases.items(), 1):
        if options.dry or (read(name, options.results) and not options.again):
            continue
        print(f"[{number}/{len(cases)}] {name}", end=" ", flush=True)
        result = run(case, options.keep and options.keep / name)
        write(result, options.results)
        print(f"({result.seconds:.0f} s): {verdict(result)}", flush=True)
    if options.page:
        page.write(_results(CASES, options.results), options.page)
    asked = _results(cases, options.results)
    print(msgspec.json.encode(summary(asked, registry())).decode())
    return int(any(each.differs for each in asked))


def _results(names: Iterable[str], directory: Path) -> list[Result]:
    return [result for name in names if (result := read(name, directory))]


if __name__ == "__main__":
    sys.exit(main())
