"""``python setup/settings_page.py FILE``: writes the page on all settings."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from pydantic.fields import FieldInfo

from backend_worker import args as worker
from common.flag_settings import FlagSettings, default_of, range_of
from frontend import args as frontend

_TEXT: Final = """\
<!-- Made by `make docs` from the declared settings: change those. -->
# Settings

A flag beats its environment variable, and that the default. An empty variable counts as unset. A
switch that is on by default is turned off with `--no-…`. A value that can't be is one sentence
that names where it stood, and the process ends with status 2; what is found out later, for example
that a key file can't be read, ends it with status 1. Flags of vLLM's own are accepted
beside these: engine flags by workers, API server flags by the frontend.

{sections}
"""


def page() -> str:
    """The page: a chapter for each side, in it a table for each group of settings."""
    both = [group for group in worker.GROUPS if group in frontend.GROUPS]
    chapters = {
        "Frontends and workers": both,
        "Frontends": [group for group in frontend.GROUPS if group not in both],
        "Workers": [group for group in worker.GROUPS if group not in both],
    }
    sections = (line for name, groups in chapters.items() for line in _chapter(name, groups))
    return _TEXT.format(sections="\n\n".join(sections))


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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
