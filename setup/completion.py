"""Completion by TAB of ``mmrouter`` and its old names, for three shells."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Final

from common.cli.mmrouter import MODULES
from common.launcher.options import OPTIONS
from setup.flag_table import Completed

Commands = Mapping[str, Mapping[str, Completed]]
"""Flags of each command."""

_OLD_NAMES: Final = {"mmrouter-frontend": "frontend", "mmrouter-worker": "worker"}

OF_STATUS: Final = {
    "--url": Completed(),
    "--admin-key-file": Completed(takes="file"),
    "--ca-file": Completed(takes="file"),
}


def scripts(
    frontend: Mapping[str, Completed], worker: Mapping[str, Completed]
) -> Mapping[str, str]:
    """Return the script of each shell, from the flags of the two large commands."""
    own = {
        flag: Completed(text, "text" if metavar else "nothing")
        for flag, (metavar, text) in OPTIONS.items()
    }
    own["--run-dir"] = Completed(OPTIONS["--run-dir"][1], "directory")
    known = {
        "frontend": frontend,
        "worker": worker,
        "up": {**worker, **frontend, **own},
        "doctor": frontend,
        "status": OF_STATUS,
        "fleet-key": {},
    }
    return {"bash": _bash(known) + "\n", "zsh": _zsh(known) + "\n", "fish": _fish(known) + "\n"}


_BASH: Final = r"""# Completion of mmrouter. In ~/.bashrc: source <(mmrouter --completion bash)
_mmrouter() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local command="${COMP_WORDS[1]}" flags IFS=$'\n'
  COMPREPLY=()
  case "${COMP_WORDS[0]##*/}" in
@old@
    *) if (( COMP_CWORD == 1 )); then
         COMPREPLY=($(compgen -W $'@commands@' -- "$word"))
         return
       fi ;;
  esac
  if [[ $word == "=" ]]; then word=""
  elif [[ $before == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  case "$before" in
@values@
  esac
  if [[ $word != -* ]]; then
    case "$command" in
      worker|up) _mmrouter_paths -d ;;
      fleet-key) if [[ $before == new ]]; then _mmrouter_paths -f; else COMPREPLY=(new); fi ;;
    esac
    return
  fi
  case "$command" in
@flags@
  esac
  COMPREPLY=($(compgen -W "$flags" -- "$word"))
}
_mmrouter_paths() {
  compopt -o filenames 2> /dev/null
  COMPREPLY=($(compgen "$1" -- "$word"))
}
complete -F _mmrouter mmrouter @names@
"""

_ZSH: Final = r"""#compdef mmrouter @names@
# Completion of mmrouter. In a directory of $fpath: mmrouter --completion zsh > DIRECTORY/_mmrouter
_mmrouter() {
  local word="$words[CURRENT]" before="$words[CURRENT-1]" command="$words[2]"
  local -a flags
  case "${words[1]:t}" in
@old@
    *) if (( CURRENT == 2 )); then
         flags=(@commands@)
         _describe command flags
         return
       fi ;;
  esac
  if [[ $word == --*=* ]]; then
    before="${word%%=*}"
    compset -P '*='
  fi
  case "$before" in
@values@
  esac
  if [[ $word != -* ]]; then
    case "$command" in
      worker|up) _files -/ ;;
      fleet-key) if [[ $before == new ]]; then _files; else compadd new; fi ;;
    esac
    return
  fi
  case "$command" in
@flags@
  esac
  _describe flag flags
}
if [[ $funcstack[1] == _mmrouter ]]; then
  _mmrouter "$@"
else
  compdef _mmrouter mmrouter @names@
fi
"""


def _cases(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"    {pattern}) {doing} ;;" for pattern, doing in pairs)


def _values(known: Commands, text: str, file: str, directory: str, words: str) -> str:
    """Return a case for each way to complete a value. ``words`` has a place for the choices."""
    ways: dict[str, list[str]] = {}
    for flag, said in {
        flag: said for each in known.values() for flag, said in each.items()
    }.items():
        if said.choices:
            way = words.replace("@words@", words_of(said.choices))
            ways.setdefault(way, []).append(flag)
        elif said.takes != "nothing":
            way = {"file": file, "directory": directory}.get(said.takes, text)
            ways.setdefault(way, []).append(flag)
    return _cases(("|".join(takers), f"{way}; return") for way, takers in ways.items())


def words_of(choices: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, choices))


def _bash(known: Commands) -> str:
    return _filled(
        _BASH,
        commands=r"\n".join([*known, "--help", "--version", "--completion"]),
        old=_cases((name, f"command={command}") for name, command in _OLD_NAMES.items()),
        values=_values(
            known,
            ":",
            "_mmrouter_paths -f",
            "_mmrouter_paths -d",
            'IFS=$\' \\n\'; COMPREPLY=($(compgen -W "@words@" -- "$word"))',
        ),
        flags=_cases(
            (command, "flags=" + shlex.quote("\n".join(flags))) for command, flags in known.items()
        ),
    )


def _zsh(known: Commands) -> str:
    def described(flags: Iterable[tuple[str, str]]) -> str:
        return " ".join(shlex.quote(f"{flag}:{text}") for flag, text in flags)

    return _filled(
        _ZSH,
        commands=described((command, MODULES[command][2]) for command in known),
        old=_cases((name, f"command={command}") for name, command in _OLD_NAMES.items()),
        values=_values(known, "_message value", "_files", "_files -/", "compadd -- @words@"),
        flags=_cases(
            (command, f"flags=({described((flag, said.help) for flag, said in flags.items())})")
            for command, flags in known.items()
        ),
    )


def _filled(template: str, **parts: str) -> str:
    for name, text in {**parts, "names": " ".join(_OLD_NAMES)}.items():
        template = template.replace(f"@{name}@", text)
    return template.rstrip()


def _fish(known: Commands) -> str:
    takers: dict[tuple[str, Completed], list[str]] = {}
    for command, flags in known.items():
        for flag, said in flags.items():
            takers.setdefault((flag, said), []).append(command)
    seen = "complete -c mmrouter -n '__fish_seen_subcommand_from"
    return "\n".join(
        [
            "# Completion of mmrouter. In config.fish: mmrouter --completion fish | source",
            "complete -c mmrouter -f",
            *(
                f"complete -c mmrouter -n __fish_use_subcommand -a {each} -d {shlex.quote(text)}"
                for each, (_, _, text) in MODULES.items()
            ),
            *(
                f"{seen} {' '.join(commands)}' {_fish_option(flag, said)}"
                for (flag, said), commands in takers.items()
            ),
            f"{seen} worker up' -a '(__fish_complete_directories)'",
            f"{seen} fleet-key' -a new",
            *(f"complete -c {name} -w 'mmrouter {each}'" for name, each in _OLD_NAMES.items()),
        ]
    )


def _fish_option(flag: str, said: Completed) -> str:
    how = {"file": "-r -F", "directory": "-x -a '(__fish_complete_directories)'", "nothing": ""}
    value = how.get(said.takes, "-x")
    if said.choices:
        value = f"-x -a {shlex.quote(words_of(said.choices))}"
    name = f"-l {flag[2:]}" if flag.startswith("--") else f"-o {flag[1:]}"
    return f"{name} {value} -d {shlex.quote(said.help)}"
