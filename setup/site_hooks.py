"""What MkDocs asks while it makes the site of ``mkdocs.yml``; ``make site`` runs it.

The site has the repository's own tree, so a link between two files is the same on both. Pages are
all that are under version control, wherever they lie. Other files that pages link to come along as
they are. A folder has nothing to show, so a link to one becomes its text.
"""

import re
from pathlib import Path
from typing import Any

from links import FENCE, LINK, ROOT, pages, slug
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_LOADED = re.compile(
    r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="((?:\w+:)?//[^"]*)"'
)
_LINK_TO = re.compile(r"\[([^]]*)\]\(([^():#\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the names that GitHub gives them."""
    config.mdx_configs["toc"] = {"slugify": lambda text, separator: slug(text)}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages and what they link to, in place of those in one folder."""
    for file in list(files):
        if (file.abs_src_path or "").startswith(config.docs_dir):
            files.remove(file)
    for path in sorted({*pages(), *_linked()}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Links to folders become text."""
    folder = (ROOT / page.file.src_uri).parent
    return _LINK_TO.sub(
        lambda link: link[1] if (folder / link[2]).is_dir() else link[0],
        markdown,
    )


def on_post_page(output: str, *, page: Any, **_: object) -> str:
    """Whoever reads the site tells nobody else. Raises PluginError for what other hosts have."""
    foreign = _LOADED.search(output)
    if foreign:
        raise PluginError(f"{page.file.src_uri} would load {foreign[1]} from another network")
    return output


def _linked() -> set[Path]:
    """Files that are no pages and that some page links to."""
    found = set()
    for page in pages():
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            target = (page.parent / link.partition("#")[0]).resolve()
            if not re.match(r"[a-z]+:", link) and target.is_file() and target.suffix != ".md":
                found.add(target)
    return found
