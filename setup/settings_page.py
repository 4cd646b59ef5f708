"""``python setup/settings_page.py FILE``: writes the page on all settings."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from backend_worker import args as worker
from common.cli import vllm_flags
from common.cli.command_line import FRONTEND
from common.cli.flag_settings import FlagSettings, default_of, plain_number
from common.vllm_compat import engine_arguments
from frontend import args as frontend

_TEXT: Final = """\
<!-- Made by `make docs` from the declared settings: change those. -->
# Settings

A flag beats its environment variable, that beats the file of `--config`, and that the default. An
empty variable counts as unset, and so does a key with nothing behind it; an empty path or address
is refused. A switch that is on by default is turned off with `--no-…`, in the file with `false`. A
value that can't be is one sentence that names where it stood, and the process ends with status 2;
what is found out later, for example that a key file can't be read, ends it with status 1. Flags of
vLLM's own are accepted beside these:
[engine flags by workers, API server flags by the frontend](#flags-of-vllm-serve).
[Others' names](#names-of-other-routers) for the same things are accepted too. An unknown flag is
an error, which names the nearest.

Settings of ours have variables. Flags of vLLM's have none, as in vLLM, but for those that stand
below with one.

What is in force, and whether flag, environment or file said so, stands on the log at start; keys,
tokens and passwords are left out.

## The file

`--config FILE` (`MMROUTER_CONFIG`) names a YAML file, for a frontend or a worker, whose keys are
flags without their dashes in front, ours and vLLM's, with dashes or underscores:

```yaml
router-mode: kv
max-inflight: 512
port: 9000
enable-auto-tool-choice: true
tool-call-parser: hermes
allowed-origins: ["https://chat.example"]
default-chat-template-kwargs: {{enable_thinking: false}}
```

A key that is no flag, or stands there twice, or a value of the wrong type is an error that names
the file and the key. Settings without a flag (below, those with a variable only) have no key. A
variable of vLLM's own, such as `VLLM_API_KEY`, stays behind vLLM's flag, be it on the command
line or in the file. What a flag says replaces the whole value in the file, also where that is a
mapping.

{sections}
"""

_ALIASES: Final = """\
## Names of other routers

A frontend takes these as well, on the command line and in the file. `--router-mode`,
`--migration-limit`, `--trust-remote-code`, `--preprocess-workers` and whatever is called as in
`vllm serve` need no other name. `--api-key` is as in `vllm serve`, users' keys, and not the
router's own.

| flag | of | here | |
|---|---|---|---|
{aliases}
"""

_VLLMS: Final = """\
## Flags of vllm serve

Each works or is refused by name; none is accepted without effect. A worker takes every flag of
the engine but those below, a frontend every flag of the server but those below and the few of the
engine's that concern it.

| flag of the server | at a frontend |
|---|---|
{server}

| flag of the server | refused, because |
|---|---|
{refused}

| flag of the engine | at a frontend as well |
|---|---|
{both}

| flag of the engine | refused by workers, because |
|---|---|
{engine}

All other flags of the engine work at a worker, and a frontend refuses them.

Variables of vLLM's are read where vLLM's own code reads them, and so is
`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`. `VLLM_KEEP_ALIVE_ON_ENGINE_DEATH` does nothing: a frontend outlives
its workers' engines anyway. With `VLLM_ENABLE_RESPONSES_API_STORE=1` a frontend does not start.
"""


def page() -> str:
    """The page: a chapter for each side, in it a table for each group of settings."""
    both = [group for group in worker.GROUPS if group in frontend.GROUPS]
    chapters = {
        "Frontends and workers": both,
        "Frontends": [group for group in frontend.GROUPS if group not in both],
        "Workers": [group for group in worker.GROUPS if group not in both],
    }
    sections = [line for name, groups in chapters.items() for line in _chapter(name, groups)]
    return _TEXT.format(sections="\n\n".join([*sections, _aliases(), _vllms().rstrip()]))


def _aliases() -> str:
    aliases = (
        (f"`{name}`", alias.of, ", ".join(f"`{flag}`" for flag in alias.flags), alias.note)
        for name, alias in FRONTEND.aliases.items()
    )
    return _ALIASES.format(aliases=_table(aliases))


def _vllms() -> str:
    engine = {**engine_arguments.REFUSED, **engine_arguments.IDLE}
    return _VLLMS.format(
        server=_by_reason(_flags(vllm_flags.SERVER)),
        refused=_by_reason(_flags(vllm_flags.SERVER_REFUSED)),
        both=_by_reason(_flags(vllm_flags.ENGINE_AT_FRONTEND)),
        engine=_by_reason(_flags(engine)),
    )


def _flags(names: Mapping[str, str]) -> dict[str, str]:
    return {
        "MODEL" if name == "model_tag" else "--" + name.replace("_", "-"): text
        for name, text in names.items()
    }


def _by_reason(flags: Mapping[str, str]) -> str:
    """A row for each reason, with all flags that have it."""
    rows: dict[str, list[str]] = {}
    for flag, reason in flags.items():
        rows.setdefault(reason, []).append(f"`{flag}`")
    return _table((", ".join(named), reason) for reason, named in rows.items())


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )


def _chapter(name: str, groups: Iterable[type[FlagSettings]]) -> Iterator[str]:
    yield f"## {name}"
    for group in groups:
        yield f"### {group.flag_group[0].upper()}{group.flag_group[1:]}"
        rows = [
            "| flag | variable | default | range | |",
            "|---|---|---|---|---|",
            *(_row(group, name, field) for name, field in group.declared().items()),
        ]
        yield "\n".join(rows)


def _row(group: type[FlagSettings], name: str, field: FieldInfo) -> str:
    flag = "" if name in group.variables else f"`{group.flag(name)}`"
    variable = f"`{group.variable(name)}`"
    # One that is made depends on who asks, and where.
    default = "" if field.default_factory else default_of(name, field)
    text = (field.description or "").replace("|", "\\|")
    return f"| {flag} | {variable} | {default} | {range_of(field)} | {text} |"


def range_of(field: FieldInfo) -> str:
    """Return the range of a number, for example ``> 0, <= 1``; empty for any."""
    bounds = []
    for each in field.metadata:
        match each:
            case Gt(gt=bound):
                bounds.append(f"> {plain_number(bound)}")
            case Ge(ge=bound):
                bounds.append(f">= {plain_number(bound)}")
            case Lt(lt=bound):
                bounds.append(f"< {plain_number(bound)}")
            case Le(le=bound):
                bounds.append(f"<= {plain_number(bound)}")
    return ", ".join(bounds)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
