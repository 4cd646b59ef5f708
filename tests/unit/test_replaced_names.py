"""What is replaced of other people's code is where setup/replaced_names.py says, with a reason."""

import pytest

from setup.replaced_names import MAX_PROCESS, PROCESS, Change, changes, changes_of, disagreements

FILE = "frontend/app.py"


@pytest.fixture(scope="module")
def found() -> list[Change]:
    return changes()


def test_the_tables_fit_the_source(found: list[Change]) -> None:
    assert disagreements(found) == []


def test_few_mechanisms_replace_names_for_a_process() -> None:
    assert len(PROCESS) <= MAX_PROCESS


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from vllm.x import y\nvars(y)['Z'] = 1", "vars(y)['Z']"),
        ("from vllm.x import y\nvars(y)['Z'], a = 1, 2", "vars(y)['Z']"),
        ("from vllm import x\nx.__dict__['z'] = 1", "x.__dict__['z']"),
        ("from vllm import x\nvars(x).update(z=1)", "vars(x).update()"),
        ("from vllm import x\nx.y = 1", "x.y"),
        ("from vllm import x\nx.y: int = 1", "x.y"),
        ("from vllm import x as z\nz.a.b = 1", "z.a.b"),
        ("def f():\n    import vllm.x\n    vllm.x.y = 1", "vllm.x.y"),
        ("from vllm import x\ndel x.y", "x.y"),
        ("import importlib as i\ni.import_module('vllm').x = 1", "i.import_module('vllm').x"),
        ("from starlette.requests import R\nsetattr(R, 'json', 1)", "setattr(R, 'json')"),
        ("def f(x):\n    setattr(x, 'a', 1)", "setattr(x, 'a')"),
        ("from vllm import x\ntype.__setattr__(x, 'a', 1)", "type.__setattr__(x, 'a')"),
        ("import sys\nsys.modules['vllm'] = None", "sys.modules['vllm']"),
        ("import sys\nsys.modules.pop('vllm')", "sys.modules.pop('vllm')"),
        ("from vllm import x\nx.f.__globals__['y'] = 1", "x.f.__globals__['y']"),
        ("from vllm import x\nx.f.__code__ = 1", "x.f.__code__"),
        ("def f(x):\n    x.__class__ = int", "x.__class__"),
        ("def f(renderer):\n    renderer._executor = 1", "renderer._executor"),
    ],
    ids=lambda text: text.splitlines()[-1],
)  # fmt: skip
def test_what_is_replaced_otherwise_is_found_out(
    source: str, said: str, found: list[Change]
) -> None:
    wrong = disagreements([*found, *changes_of(source, FILE)])
    assert f"{FILE} replaces {said}, and setup/replaced_names.py has no reason" in wrong


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self, other):\n        self._x = 1\n        other._x = 2",
        "from common.request_plane.wire import x\nx.y = 1",
        "def f(member):\n    member.link = 1",
        "def f(error):\n    error.__traceback__ = None",
        "def f(table):\n    table['x'] = 1\n    table.update(x=1)",
    ],
)
def test_what_is_ours_is_left_alone(source: str) -> None:
    assert not any(each.foreign for each in changes_of(source, FILE))


def test_what_is_not_replaced_any_more_leaves_the_tables(found: list[Change]) -> None:
    kept = [each for each in found if each.expression != "Request.json"]
    assert disagreements(kept) == ["frontend/gate/body_gate.py does not replace Request.json"]
