"""``mmrouter``: one command for all modules that can be run."""

import os
import sys
from typing import Final

from common.aio.processes import python_command
from common.cli.flag_settings import unknown
from common.cli.known_flags import print_completion, version_line

MODULES: Final = {
    "frontend": ("frontend", (), "serve OpenAI's API in front of workers"),
    "worker": ("backend_worker", (), "serve a vLLM engine to frontends"),
    "up": ("common.launcher", (), "start workers and a frontend on this machine for a model"),
    "doctor": ("frontend", ("--check",), "say what a frontend on this machine can serve"),
    "status": ("common.launcher.status", (), "print the workers that a running frontend knows"),
    "fleet-key": ("common.fleet_key", (), "make the key with which a fleet encrypts"),
}
"""Module, flags in front, and help, by command."""

_HELP: Final = "\n".join(
    [
        "usage: mmrouter COMMAND [flags]",
        "",
        "A frontend for multimodal models in front of many vLLM workers.",
        "",
        *(f"  {name:<10}{text}" for name, (_, _, text) in MODULES.items()),
        "",
        "mmrouter COMMAND --help says more. mmrouter --completion bash (zsh, fish) prints a script",
        "with which the shell completes commands, flags and values.",
    ]
)


def main() -> None:
    """Replace this process by the module of a command. Exit status 2 for an unknown command."""
    command, *flags = sys.argv[1:] or ["--help"]
    if command == "--completion":
        print_completion(flags)
    if command in MODULES:
        module, before, _ = MODULES[command]
        words = [*python_command(module), *before, *flags]
        os.execv(words[0], words)
    if command in ("-h", "--help", "--version"):
        print(version_line() if command == "--version" else _HELP)
        sys.exit()
    kind, known = "command ", list(MODULES)
    if command.startswith("-"):
        kind, known = "", ["--help", "--version", "--completion"]
    print(f"{_HELP}\nmmrouter: error: {kind}{unknown(command, known)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
