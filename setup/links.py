"""``python setup/links.py``: every link between the project's pages leads to a file and a heading,
and every file of ours that they name is there.

Links to other hosts are not followed: what they lead to is not ours, and there may be no network.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`((?:backend_worker|common|examples|frontend|setup|tests)/[\w./-]+\.\w+)`")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def pages() -> list[Path]:
    """All pages under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split()]


def slug(text: str) -> str:
    """The name of a heading, as GitHub makes it."""
    return _NOT_IN_ANCHORS.sub("", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Names of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in _HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading)
        name = slug(text)
        again = sum(each == name or each.startswith(f"{name}-") for each in found)
        found.append(f"{name}-{again}" if name in found else name)
    return frozenset(found)


def broken(page: Path) -> Iterator[str]:
    """A sentence for each link of a page that leads nowhere."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(ROOT)}: {link}"
        if not target.exists():
            yield f"{where} is no file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{where} is no heading"


def missing(page: Path) -> Iterator[str]:
    """A sentence for each file that a page names and that is nowhere, nor among the unit tests."""
    for name in _FILE.findall(page.read_text()):
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "tests/unit")):
            yield f"{page.relative_to(ROOT)}: {name} is no file"


def main() -> None:
    """Exits with status 1 if a link or a name leads nowhere."""
    sentences = [each for page in pages() for check in (broken, missing) for each in check(page)]
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    sys.exit(bool(sentences))


if __name__ == "__main__":
    main()
