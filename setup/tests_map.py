"""``python setup/tests_map.py FILE``: writes which tests hold each module of the product.

A module is held by the tests that bear its name, else by those that import it. What no test imports
stands in ``THROUGH``, with the test that runs it all the same. ``tests/unit/test_tests_map.py``
fails when a module has none of these.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("backend_worker", "common", "frontend")

THROUGH: Final[Mapping[str, str]] = {
    "common/cli/mmrouter.py": "common/test_mmrouter_command.py",
    "common/cli/worker_settings.py": "common/test_startup_checks.py",
    "common/media/quick_decoders.py": "frontend/fetch/test_decode.py",
    "common/transfer/pages.py": "common/test_large_memory.py",
    "frontend/client_turns.py": "frontend/fetch/test_loader.py",
    **{
        f"common/launcher/{name}.py": "deploy/test_up.py"
        for name in (
            "__main__",
            "devices",
            "fleet",
            "frontend_access",
            "sweeper",
        )
    },
    "frontend/door.py": "frontend/http/test_error_shapes.py",
    "frontend/workers/media_sender.py": "test_nixl_on_demand.py",
    "backend_worker/engine/statistics.py": "backend_worker/test_engine_steps.py",
    "backend_worker/plane/load_report.py": "test_load_of_others.py",
    "backend_worker/kv_events/event_publisher.py": "backend_worker/test_event_publisher.py",
    "backend_worker/plane/request.py": "test_request_plane.py",
    "backend_worker/plane/session.py": "test_request_plane.py",
    "backend_worker/args.py": "test_settings.py",
    "backend_worker/supervise.py": "backend_worker/test_supervise.py",
    "common/discovery/etcd/discovery.py": "common/discovery/etcd/test_etcd.py",
    "common/discovery/file/discovery.py": "common/discovery/file/test_file.py",
    "common/discovery/kubernetes/publisher.py": "common/discovery/kubernetes/test_kubernetes.py",
    "common/launcher/status.py": "common/test_mmrouter_command.py",
    "frontend/router/ejection.py": "frontend/http/test_manage.py",
    "frontend/models.py": "tests/e2e/test_several_models.py",
    "common/discovery/sealed_cards.py": "common/discovery/file/test_file.py",
    "common/discovery/watcher.py": "common/discovery/file/test_file.py",
    "common/discovery/base.py": "common/discovery/file/test_file.py",
    "frontend/workers/operations.py": "test_operations_flow.py",
    "common/aio/ipc.py": "common/transfer/shared_arena/test_keeper.py",
    "common/cli/process_settings.py": "test_settings.py",
    "common/aio/cleanup.py": "common/transfer/arena/test_arena.py",
    "common/transfer/shm.py": "common/transfer/test_shm.py",
    "common/transfer/checksum.py": "common/transfer/nixl/test_nixl.py",
    "common/transfer/nixl/landing.py": "common/transfer/nixl/test_leases.py",
    "common/media/formats.py": "frontend/fetch/test_decode.py",
    "common/media/picture_strips.py": "frontend/fetch/test_decode.py",
    "common/media/webp_and_avif.py": "frontend/fetch/test_decode.py",
    "common/observability/watchdog.py": "common/test_watchdog.py",
    "frontend/http/error_shapes.py": "frontend/http/test_error_shapes.py",
    "frontend/http/server/serving_threads.py": "tests/e2e/test_speech.py",
    "frontend/bounded/forks.py": "frontend/processing/test_structures.py",
    "frontend/bounded/work.py": "frontend/processing/test_structures.py",
    "frontend/bounded/orders.py": "frontend/processing/test_structures.py",
    "frontend/bounded/structure_server.py": "frontend/processing/test_structures.py",
    "frontend/bounded/template_server.py": "frontend/processing/test_client_templates.py",
    "frontend/processing/mistral_chat.py": "frontend/processing/test_mistral_chat.py",
    "common/transfer/nixl_processes/child.py": "common/transfer/nixl/test_strangers.py",
    "common/transfer/nixl/process.py": "common/transfer/nixl/test_strangers.py",
    "common/transfer/nixl/reading.py": "common/transfer/nixl/test_nixl.py",
    "common/transfer/nixl_processes/server.py": "common/transfer/nixl/test_nixl.py",
    "common/transfer/shared_arena/connection.py": "common/transfer/shared_arena/test_keeper.py",
    "common/transfer/shared_arena/messages.py": "common/transfer/shared_arena/test_keeper.py",
    "frontend/app.py": "tests/e2e/test_processes.py",
    "common/transfer/shared_arena/media_claims.py": "common/transfer/shared_arena/test_keeper.py",
    "frontend/processes/child.py": "frontend/processes/test_parent.py",
    "frontend/processes/parent.py": "frontend/processes/test_parent.py",
    "frontend/processes/siblings.py": "frontend/processes/test_parent.py",
    "frontend/fetch/resolver.py": "frontend/fetch/test_http.py",
    "frontend/fetch/processor_memory.py": "frontend/processing/test_processor_memory.py",
    "frontend/fetch/sound_limit.py": "frontend/fetch/test_decode.py",
    "frontend/fetch/video_limit.py": "frontend/fetch/test_decode.py",
    "common/aio/fork_server.py": "frontend/processing/test_hung_processes.py",
    "frontend/processing/child.py": "frontend/processing/test_pool.py",
    "frontend/fetch/decoder_child.py": "frontend/fetch/test_decoder_processes.py",
    "frontend/processing/exchange.py": "frontend/processing/test_pool.py",
    "frontend/processing/prompt_media.py": "frontend/processing/test_media_processing.py",
    "frontend/processing/processed_once.py": "frontend/processing/test_media_processing.py",
    "frontend/processing/renderer_processing.py": "frontend/processing/test_client_hashes.py",
    "frontend/request/state.py": "frontend/request/test_runner.py",
    "frontend/workers/contract.py": "frontend/workers/test_fleet.py",
    "frontend/workers/fleet.py": "frontend/workers/test_fleet.py",
    "frontend/workers/partial_decode.py": "test_request_plane_strangers.py",
    "frontend/workers/members.py": "frontend/workers/test_fleet.py",
    "frontend/router/events/progress.py": "frontend/router/test_event_stream.py",
    "frontend/router/events/event_stream.py": "frontend/router/test_event_stream.py",
    "frontend/router/index/chunks.py": "frontend/router/test_kv_index.py",
    "frontend/router/in_flight.py": "frontend/router/test_router.py",
    "frontend/router/roster.py": "frontend/router/test_router.py",
    "frontend/router/selection/costs.py": "frontend/router/test_modes.py",
}
"""Below ``tests/unit/`` unless it begins with ``tests/``."""

_TEXT: Final = """\
<!-- Made by `make docs` from the tests' names and imports, and setup/tests_map.py. -->
# Where each module is tested

The tests that bear a module's name, else those that import it, at most three of them. Paths are
below `tests/unit/` unless they begin with `tests/`. What several test modules share is in
`tests/fakes/`.

| module | tests |
|---|---|
{rows}
"""


def modules() -> list[str]:
    """The product's files, by path, without doors and entry points."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return [str(file.relative_to(ROOT)) for file in files if not file.name.startswith("__")]


def tests() -> list[Path]:
    """All test modules."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def holders() -> dict[str, list[str]]:
    """For each module of the product the tests that hold it, best first."""
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for test in tests():
        for module in _imported(test):
            importers[module].add(test)
    found = {}
    for module in modules():
        name = module.removesuffix(".py").replace("/", ".")
        those = importers[name]
        named = sorted(test for test in those if _is_named_after(test, module))
        # Those of the same folder know most of it.
        rest = sorted(those, key=lambda test: (-_shared(test, module), str(test)))
        through = [THROUGH[module]] if module in THROUGH else []
        found[module] = [_short(test) for test in named or rest[:3]] or through
    return found


def page() -> str:
    """The page, with a row for each module."""
    rows = (
        f"| `{module}` | {', '.join(f'`{test}`' for test in those)} |"
        for module, those in holders().items()
    )
    return _TEXT.format(rows="\n".join(rows))


def _imported(test: Path) -> set[str]:
    """Modules of the product that a test imports, directly or by a stand-in of the tests."""
    found: set[str] = set()
    files, seen = [test], {test}
    while files:
        for name in _imports(files.pop()):
            stand_in = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith(PACKAGES):
                found.add(name)
            elif name.startswith("tests.") and stand_in.is_file() and stand_in not in seen:
                seen.add(stand_in)
                files.append(stand_in)
    return found


@cache
def _imports(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            door = _behind(node.module)
            names.append(node.module)
            names += (door.get(alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    return names


@cache
def _behind(folder: str) -> dict[str, str]:
    """The modules in which the names lie that a folder's door exports."""
    door = ROOT / folder.replace(".", "/") / "__init__.py"
    if not folder.startswith(PACKAGES) or not door.is_file():
        return {}
    return {
        alias.name: node.module
        for node in ast.parse(door.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _is_named_after(test: Path, module: str) -> bool:
    return test.stem == f"test_{Path(module).stem}"


def _shared(test: Path, module: str) -> int:
    """How many folders of a module's path a test's path has as well."""
    return len(set(test.parts) & set(Path(module).parts))


def _short(test: Path) -> str:
    return str(test.relative_to(ROOT)).removeprefix("tests/unit/")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
