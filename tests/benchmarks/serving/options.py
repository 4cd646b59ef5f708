"""The command line of a race."""

import argparse
import shlex
from pathlib import Path
from typing import Final

from tests.benchmarks.serving.contenders import (
    CACHE_AWARE,
    DATA_PARALLEL,
    DYNAMO,
    KV,
    ROUND_ROBIN,
    TABLE,
    named,
)
from tests.benchmarks.serving.traffic import plan

CONTENDERS: Final = (KV, ROUND_ROBIN, DATA_PARALLEL, CACHE_AWARE, DYNAMO)
LOADS: Final = ("pictures-1@16", "pictures-4@16", "text@16", "streams@8")


def positive(text: str) -> int:
    """A number of things of which there must be one.

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serving",
        description="Race ways to serve one model over engines whose GPU is the clock.",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=CONTENDERS,
        help=f"of {', '.join(each.name for each in TABLE)}",
    )
    parser.add_argument(
        "--then",
        nargs="+",
        default=[],
        action="append",
        metavar="CONTENDER",
        help="a group that races afterwards, with the first contender in it as well: for more "
        "contenders than fit in memory; can be repeated",
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        default=(),
        type=Path,
        metavar="CHECKOUT",
        help="other checkouts of this project, whose frontends race as well",
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        default=LOADS,
        help="KIND@CLIENTS, KIND@RATE/s or KIND@PERCENT%%; see tests/benchmarks/README.md",
    )
    parser.add_argument("--engines", type=positive, default=4, help="of each contender")
    parser.add_argument("--speed", type=float, default=0.5, help="of the GPUs; 1 is an H100's")
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="every second engine has so much of --speed; not with data-parallel, which is one "
        "process with all engines",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="engines that compute the demo model on the CPU, not those whose GPU is the clock",
    )
    parser.add_argument(
        "--engine-args",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="more flags of vLLM's for all engines, quoted as in a shell",
    )
    parser.add_argument("--rounds", type=positive, default=6, help="blocks of each contender")
    parser.add_argument("--requests", type=positive, default=64, help="in a block")
    parser.add_argument("--side", type=positive, default=896, help="of pictures, in pixels")
    parser.add_argument(
        "--first-limit-ms", type=float, default=1000.0, help="for goodput, divided by --speed"
    )
    parser.add_argument(
        "--between-limit-ms", type=float, default=50.0, help="for goodput, divided by --speed"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="file for the figures of all blocks")
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE.jsonl",
        help="write the first load's requests for `vllm bench serve`, and race nobody",
    )
    parser.add_argument("--keep", type=Path, help="new directory for the logs, instead of none")
    options = parser.parse_args()
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: there is something in {options.keep} already")
    try:
        options.groups = [named(options.contenders, options.beside)] + [
            named([options.contenders[0], *group]) for group in options.then
        ]
        options.loads = plan(options.loads)
    except ValueError as error:
        parser.error(str(error))
    everyone = [each.name for group in options.groups for each in group]
    one_speed = options.real or DATA_PARALLEL in everyone
    if options.slower != 1 and one_speed:
        parser.error("--slower: engines of data-parallel and --real have one speed")
    return options
