"""The shape of the code gets no worse: see the table at the end of CONTRIBUTING.md."""

import ast

import pytest

from setup.house import (
    PAGE,
    REMEDY,
    Figure,
    Source,
    arrows,
    limits,
    measure,
    sources,
    without_worse,
)


def test_no_figure_is_worse_than_in_the_table(subtests: pytest.Subtests) -> None:
    """Where it is better, `make docs` writes it down, and from then on it holds."""
    allowed = limits(PAGE.read_text())
    for figure in measure(sources()):
        with subtests.test(figure.name):
            assert figure.name in allowed, "run `make docs`"
            limit = allowed[figure.name]
            worse = f"{figure.name}: {figure.value:g}, over {limit:g} {figure.where}. {REMEDY}"
            assert not figure.is_worse_than(limit), worse


def test_what_the_figures_count() -> None:
    code = """
from common.b import x

class A:
    def one(self):
        self._own = self._own
        if x:
            for y in x._private:
                try: y()
                except Exception: raise
    def two(self) -> Any: ...
"""
    file = Source("frontend.a.c", code, ast.parse(code))
    values = {figure.name: figure.value for figure in measure([file])}
    assert values["methods of the largest class"] == 2
    assert values["blocks within each other, at most"] == 3
    assert values["broad `except`"] == values["private names of another module"] == 1
    assert values["lines of the longest function"] == 6
    assert values["`Any` per 1,000 lines"] == pytest.approx(1000 / code.count("\n"), abs=0.1)
    assert arrows([file]) == {("frontend.a", "common.b")}


def test_nothing_but_its_option_raises_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Figure("lines", 9), Figure("files", 3), Figure("new", 1), Figure("median", 9, False)]
    allowed = {"lines": 8.0, "files": 4.0, "median": 8.0}
    kept = {each.name: each.value for each in without_worse(figures, allowed)}
    assert kept == {"lines": 8, "files": 3, "new": 1, "median": 9}
    assert capsys.readouterr().out.startswith("lines: 9, over the limit of 8. Remove")


def test_totals_count() -> None:
    code = """
class RouterSettings(FlagSettings):
    flag_group: ClassVar[str] = "routing"
    mode: str = Field("kv")
    kept: int = 0

class Other:
    more: str = Field("kv")

    def method(self): ...

class Layer:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = App(scope)  # type: ignore[arg-type]

_one: ContextVar[int] = ContextVar("one")
_two = ContextVar[int]("two")
"""
    file = Source("frontend.router.settings", code, ast.parse(code))
    values = {figure.name: figure.value for figure in measure([file])}
    assert values["settings of ours"] == values["settings of the router"] == 1
    assert values["context variables"] == 2
    assert values["layers of ASGI"] == values["`type: ignore`"] == 1
    assert values["lines of the longest class"] == 4
    assert (values["files"], values["lines"]) == (1, code.count("\n"))
