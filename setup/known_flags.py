"""Make the files of ``common/cli/tables`` for the vLLM of this environment.

    python -m setup.known_flags [--check]

With ``--check`` it writes none, and ends with status 1 if they would be others.
"""

import sys

import msgspec

from common.cli.known_flags import KnownFlags, file_of
from common.vllm_compat.preflight import use_cpu_only


def tables() -> dict[str, KnownFlags]:
    """Return what the files have to say, by command."""
    use_cpu_only()
    sys.argv = ["known_flags", "--help"]  # or vLLM leaves out what its flags are for
    import backend_worker.args
    import frontend.args

    return {
        "frontend": frontend.args.known_flags(),
        "worker": backend_worker.args.known_flags(),
    }


def main(argv: list[str]) -> None:
    for command, table in tables().items():
        made = msgspec.json.format(msgspec.json.encode(table, order="deterministic")) + b"\n"
        file = file_of(command)
        if argv != ["--check"]:
            file.write_bytes(made)
        elif not file.exists() or file.read_bytes() != made:
            sys.exit(f"{file}: make docs")


if __name__ == "__main__":
    main(sys.argv[1:])
