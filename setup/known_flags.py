"""Make the files of ``common/cli/tables`` for the vLLM of this environment.

    python -m setup.known_flags [--check]

With ``--check`` it writes none, and ends with status 1 if they would be others.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from common.cli.known_flags import Number, table_file
from common.vllm_compat.preflight import use_cpu_only

# Flags that people need first, in the order of the help.
_FRONTEND_FIRST: Final = (
    "--host", "--port", "--discovery", "--fleet-key-file", "--api-key-file", "--admin-key-file",
    "--ssl-certfile", "--ssl-keyfile", "--router-mode", "--processes",
    "--enable-auto-tool-choice", "--tool-call-parser",
)  # fmt: skip
_WORKER_FIRST: Final = (
    "--served-model-name", "--max-model-len", "--gpu-memory-utilization",
    "--tensor-parallel-size", "--data-parallel-size", "--limit-mm-per-prompt",
    "--worker-id", "--worker-host", "--worker-port", "--discovery",
    "--fleet-key-file",
)  # fmt: skip


def made() -> Iterator[tuple[Path, bytes]]:
    """Yield each file, and what it has to say."""
    use_cpu_only()
    from vllm.engine import arg_utils
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    import backend_worker.args as worker
    import frontend.args as frontend
    from setup.completion import scripts
    from setup.flag_table import Command, make_table

    arg_utils.NEEDS_HELP = True  # or vLLM leaves out what its flags are for
    front, of_frontend = make_table(
        Command(
            frontend.PROG,
            "[flags]",
            frontend.ABOUT,
            _FRONTEND_FIRST,
            {"--check": "say what this machine can serve with the other flags, without serving"},
        ),
        frontend.GROUPS,
        frontend.server_arguments().make_arg_parser,
        frontend.refusal_at_frontend,
    )
    parsers = {
        "--tool-call-parser": sorted(ToolParserManager.list_registered()),
        "--reasoning-parser": sorted(ReasoningParserManager.list_registered()),
    }
    front = msgspec.structs.replace(
        front,
        parsers=parsers,
        numbers=front.numbers | {"--port": Number(whole=True, ge=0, le=65535)},
    )
    back, of_worker = make_table(
        Command(worker.PROG, "MODEL [flags]", worker.ABOUT, _WORKER_FIRST),
        worker.GROUPS,
        worker.add_vllms,
        worker.refusal_at_worker,
    )
    for command, table in (("frontend", front), ("worker", back)):
        text = msgspec.json.format(msgspec.json.encode(table, order="deterministic")) + b"\n"
        yield table_file(command, "json"), text
    for shell, script in scripts(of_frontend, of_worker).items():
        yield table_file("mmrouter", shell), script.encode()


def main(argv: list[str]) -> None:
    for file, text in made():
        if argv != ["--check"]:
            file.write_bytes(text)
        elif not file.exists() or file.read_bytes() != text:
            sys.exit(f"{file}: make docs")


if __name__ == "__main__":
    main(sys.argv[1:])
