"""Measure the shape of the code, for the table at the end of CONTRIBUTING.md.

    python setup/house.py            # print the figures
    python setup/house.py --write    # write into CONTRIBUTING.md those that got better
    python setup/house.py --raise    # write all, worse ones too

``tests/unit/test_house.py`` fails when a figure is worse than the one in the table.
"""

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGES = ("backend_worker", "common", "frontend")
PAGE = ROOT / "CONTRIBUTING.md"
REMEDY = "Remove something, or run `setup/house.py --raise` in a commit that says why."
BEGIN, END = "<!-- made by setup/house.py -->", "<!-- end -->"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NESTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


class Figure(NamedTuple):
    """One row of the table.

    Attributes:
        name: what is counted, and in what unit.
        value: less is better.
        limited: whether a larger value fails the test; growth alone is no harm.
        where: the file and line that has this value, if one has.
    """

    name: str
    value: float
    limited: bool = True
    where: str = ""

    def is_worse_than(self, allowed: float) -> bool:
        """Whether the test has to fail."""
        return self.limited and self.value > allowed


class Source(NamedTuple):
    """One file of the product."""

    module: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def folder(self) -> str:
        """Its package below the three, such as ``frontend.router.index``."""
        return self.module.rpartition(".")[0]


def sources(root: Path = ROOT) -> list[Source]:
    """All files of the product."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            text = path.read_text()
            found.append(Source(".".join(parts), text, ast.parse(text)))
    return found


def measure(files: list[Source]) -> list[Figure]:
    """The figures, in the order of the table."""
    lengths = [file.lines for file in files]
    nodes = [node for file in files for node in ast.walk(file.tree)]
    functions = [_length(node) for node in nodes if isinstance(node, _FUNCTIONS)]
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    return [
        Figure("files", len(files)),
        Figure("lines", sum(lengths)),
        Figure("settings of ours", _settings(files)),
        Figure("settings of the router", _settings(files, "frontend.router.")),
        Figure("context variables", sum(_calls(node, "ContextVar") for node in nodes)),
        Figure("families of metrics", _families(files)),
        Figure("layers of ASGI", sum(map(_is_layer, nodes))),
        Figure("words of the pages for people", _words()),
        Figure("lines of the median file", statistics.median(lengths), limited=False),
        _largest("lines of the longest file", [(each.lines, each.module) for each in files]),
        _largest("lines of the longest function", _each(files, _FUNCTIONS, _length)),
        Figure("functions over 40 lines, per cent", _per_cent(functions, 40)),
        _largest("lines of the longest class", _each(files, ast.ClassDef, _length)),
        _largest("methods of the largest class", _each(files, ast.ClassDef, _methods)),
        _largest("blocks within each other, at most", _each(files, _FUNCTIONS, _depth)),
        Figure("`Any` per 1,000 lines", round(1000 * anys / sum(lengths), 1)),
        Figure("`type: ignore`", sum(file.text.count("# type: ignore") for file in files)),
        Figure("broad `except`", sum(_is_broad(node) for node in nodes)),
        Figure("private names of another module", sum(map(_foreign_privates, files))),
        Figure("arrows between folders", len(arrows(files)), limited=False),
        Figure("arrows between folders that point both ways", _both_ways(arrows(files))),
    ]


def _largest(name: str, values: list[tuple[int, str]]) -> Figure:
    value, where = max(values)
    return Figure(name, value, where=where)


def _each(
    files: list[Source],
    kind: type[ast.AST] | tuple[type[ast.AST], ...],
    count: Callable[[Any], int],
) -> list[tuple[int, str]]:
    """A count for each node of a kind, with where that is."""
    return [
        (count(node), f"{file.module}:{getattr(node, 'lineno', 0)}")
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, kind)
    ]


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, _FUNCTIONS) for each in node.body)


def _settings(files: list[Source], within: str = "") -> int:
    """Fields of classes of settings; one that frontends and workers have counts once."""
    classes = [
        node
        for file in files
        if file.module.startswith(within)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return sum(
        isinstance(field, ast.AnnAssign)
        and field.value is not None
        and _calls(field.value, "Field")
        for node in classes
        if _declares_settings(node)
        for field in node.body
    )


def _declares_settings(node: ast.ClassDef) -> bool:
    """Whether a class makes flags of its fields; a policy's become flags of another class."""
    bases = {ast.unparse(base) for base in node.bases}
    return node.name == "FetchPolicy" or any(base.endswith("Settings") for base in bases)


_METRICS = ("Counter", "Gauge", "Histogram", "QuickHistogram", "Asked")


def _families(files: list[Source]) -> int:
    tables = [file.tree for file in files if file.module == "common.observability.telemetry"]
    return sum(
        isinstance(node, ast.Assign) and any(_calls(node.value, name) for name in _METRICS)
        for tree in tables
        for node in tree.body
    )


def _calls(node: ast.AST, name: str) -> bool:
    """Whether it is a call of a name, or of what a name is subscripted to."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return isinstance(called, ast.Name) and called.id == name


def arrows(files: list[Source]) -> set[tuple[str, str]]:
    """Which folder imports from which."""
    modules = {file.module for file in files}
    found = set()
    for file in files:
        for name in _imported(file):
            folder = name if name not in modules else name.rpartition(".")[0]
            if folder != file.folder and not file.folder.startswith(folder + "."):
                found.add((file.folder, folder))
    return found


def _imported(file: Source) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            yield node.module or ""


def _both_ways(found: set[tuple[str, str]]) -> int:
    return sum((there, here) in found for here, there in found) // 2


def _is_layer(node: ast.AST) -> bool:
    """Whether it is a class that ASGI calls."""
    return isinstance(node, ast.ClassDef) and any(
        isinstance(each, ast.AsyncFunctionDef)
        and each.name == "__call__"
        and [arg.arg for arg in each.args.args] == ["self", "scope", "receive", "send"]
        for each in node.body
    )


_MADE = "<!-- Made by"
"""How pages and parts begin that are made from code: they grow with what they list."""
_MADE_PART = re.compile(f"{_MADE}.*?<!-- End of what is made. -->", re.DOTALL)


def _words() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text() for page in pages]
    return sum(
        len(_MADE_PART.sub("", text).split()) for text in texts if not text.startswith(_MADE)
    )


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _per_cent(values: list[int], limit: int) -> float:
    return round(100 * sum(value > limit for value in values) / len(values), 1)


def _depth(node: ast.AST) -> int:
    """How many blocks stand within each other, functions within aside."""
    inner = [
        _depth(child) for child in ast.iter_child_nodes(node) if not isinstance(child, _FUNCTIONS)
    ]
    return max(inner, default=0) + isinstance(node, _NESTS)


def _is_broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = ast.walk(node.type) if node.type else [ast.Name("BaseException")]
    names = {each.id for each in caught if isinstance(each, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def _foreign_privates(file: Source) -> int:
    """Attributes with an underscore that this file does not make itself."""
    nodes = list(ast.walk(file.tree))
    own = {node.attr for node in nodes if _is_own_attribute(node)}
    own |= {node.name for node in nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    own |= {target.id for target in fields if isinstance(target, ast.Name)}
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        for node in nodes
    )


def _is_own_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
        and isinstance(node.ctx, ast.Store)
    )


def table(figures: list[Figure]) -> str:
    """As it stands in the page."""
    rows = [f"| {each.name} | {each.value:g} |" for each in figures]
    return "\n".join(["| figure | value |", "|---|---|", *rows])


def limits(page: str) -> dict[str, float]:
    """The values that the page has."""
    rows = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: float(value) for name, value in cells}


def without_worse(figures: list[Figure], allowed: dict[str, float]) -> list[Figure]:
    """The figures, those that got worse as they were; says which these are."""
    kept = []
    for each in figures:
        limit = allowed.get(each.name, each.value)
        if each.is_worse_than(limit):
            print(f"{each.name}: {each.value:g}, over the limit of {limit:g}. {REMEDY}")
        kept.append(each._replace(value=limit) if each.is_worse_than(limit) else each)
    return kept


def main() -> None:
    """Print the table, or write it into the page."""
    figures = measure(sources())
    if not {"--write", "--raise"} & set(sys.argv):
        print(table(figures))
        return
    page = PAGE.read_text()
    if "--raise" not in sys.argv:
        figures = without_worse(figures, limits(page))
    made = table(figures)
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
