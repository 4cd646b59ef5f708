"""Where vLLM is touched is where setup/vllm_map.py and the page say."""

import ast
import importlib
from collections.abc import Iterable, Iterator

import pytest

from setup.vllm_map import (
    BEGIN,
    END,
    MOVED,
    NEW,
    PACKAGES,
    ROOT,
    Import,
    disagreements,
    imports,
    imports_of,
    page,
)
from tests.by_version import since_033

ENGINE = "backend_worker/engine/vllm_engine.py"
PATCHES = "common/vllm_compat/renderer_patches.py"
OLD = since_033({"vllm.transformers_utils.processors.cosmos3_edge"}, set[str]())
"""Modules that only tests import, of models that 0.33 takes from elsewhere or leaves out."""


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return imports()


def test_the_map_fits_the_imports(found: list[Import]) -> None:
    assert disagreements(found) == []


def test_all_that_is_imported_is_there(found: list[Import]) -> None:
    """Says everything at once that a newer vLLM has moved, also what only tests import. Importing
    our own modules would end at the first."""
    of_tests = (
        each
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != ROOT / "tests/gpu/kernels.py"  # for GPUs only
        for each in imports_of(path.read_text(), path.relative_to(ROOT).as_posix())
    )
    not_in_all = {*MOVED, *MOVED.values(), *NEW, *OLD}
    stay = [each for each in (*found, *of_tests) if each.module not in not_in_all]
    lost = list(gone(stay))
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize(("older", "newer"), MOVED.items())
def test_what_moved_is_in_one_of_two_places(older: str, newer: str) -> None:
    """Only the file for it knows that there are two."""
    places = [Import(ENGINE, module, None) for module in (older, newer)]
    assert len(list(gone(places))) == 1


@pytest.mark.parametrize("module", NEW)
def test_what_is_new_is_there_from_then_on(module: str) -> None:
    assert len(list(gone([Import(ENGINE, module, None)]))) == since_033(0, 1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import vllm.no_such", "No module named 'vllm.no_such'"),
        ("from vllm.no_such.module import x", "No module named 'vllm.no_such'"),
        ("from vllm.outputs import NoSuch", "vllm.outputs has no NoSuch"),
    ],
    ids=["module", "module that has a name", "name"],
)
def test_an_import_of_what_is_gone_is_found_out(source: str, said: str) -> None:
    assert list(gone(imports_of(source, ENGINE))) == [f"{ENGINE}: {said}"]


def gone(found: Iterable[Import]) -> Iterator[str]:
    for each in found:
        try:
            module = importlib.import_module(each.module)
        except ImportError as error:
            yield f"{each.file}: {error}"
        else:
            if each.name is not None and not hasattr(module, each.name):
                yield f"{each.file}: {each.module} has no {each.name}"


def test_the_page_is_made_from_them(found: list[Import]) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert page(text, found) == text, "make docs"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from vllm.v1.core import sched", "imports all of vllm.v1.core.sched, which"),
        ("from vllm.outputs import STREAM_FINISHED", "imports STREAM_FINISHED of vllm.outputs"),
        ("def f():\n    import vllm.utils", "imports all of vllm.utils, which"),
        ("if TYPE_CHECKING:\n    from vllm.v1 import x", "imports x of vllm.v1, which"),
    ],
    ids=["module", "no value", "in a function", "for types only"],
)
def test_an_import_that_nobody_thought_about_is_found_out(
    source: str, said: str, found: list[Import]
) -> None:
    (wrong,) = further(found, [*found, *imports_of(source, ENGINE)])
    assert wrong.startswith(f"{ENGINE} {said}")


def test_a_file_may_not_import_what_another_one_may(found: list[Import]) -> None:
    (wrong,) = further(
        found, [*found, Import("common/request_plane/wire.py", "vllm.renderers", "X")]
    )
    assert wrong.startswith("common/request_plane/wire.py imports X of vllm.renderers")


def test_values_may_be_imported_anywhere(found: list[Import]) -> None:
    (value,) = imports_of("from vllm.outputs import RequestOutput", "common/request_plane/wire.py")
    assert not further(found, [*found, value])


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "vllm.v1.serial_utils",
            "common/request_plane/wire.py does not import vllm.v1.serial_utils",
        ),
        ("vllm.pooling_params", "nobody imports the value PoolingParams of vllm.pooling_params"),
    ],
)
def test_what_the_map_has_too_much_is_found_out(
    module: str, said: str, found: list[Import]
) -> None:
    (wrong,) = further(found, [each for each in found if each.module != module])
    assert wrong.startswith(said)


def further(found: list[Import], changed: list[Import]) -> set[str]:
    """What a change adds, so that one import that nobody thought about fails one test."""
    return set(disagreements(changed)) - set(disagreements(found))


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="both marks"):
        page(text, [])


def test_one_module_replaces_what_is_replaced_on_the_renderer() -> None:
    """Found by how things are named: ``renderer.x = ...``, ``del self._processor.x``."""
    changing = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(changes_renderer(ast.parse(path.read_text())))
    }
    assert changing == {PATCHES}, f"replace it in {PATCHES} alone"


def changes_renderer(module: ast.Module) -> Iterator[bool]:
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value, _, ast.Store() | ast.Del()):
                changed = ast.unparse(value)
            case ast.Call(ast.Name("setattr" | "delattr"), [value, *_]):
                changed = ast.unparse(value)
            case _:
                continue
        yield changed.removesuffix("output_processor").endswith(("renderer", "processor"))
