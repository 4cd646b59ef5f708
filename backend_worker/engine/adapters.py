"""LoRA adapters of a worker, from ``--lora-modules`` at start or from operators at run time.
Requests name an adapter; the worker alone decides which files that means."""

import argparse
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from vllm.lora.request import LoRARequest

from common.errors import (
    ConfigurationError,
    OperationRefusedError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.lru import Lru
from common.request_plane.card import MAX_ADAPTERS, Adapter
from common.request_plane.operations import (
    LoadLoraAdapter,
    UnloadLoraAdapter,
    has_adapter_already,
    has_no_adapter,
    has_the_models_name,
)

MAX_FORMER: Final = 64  # removed adapters that are remembered


def read_adapter(text: str) -> Adapter:
    """Parse one value of ``--lora-modules``: ``name=path`` or JSON, as ``vllm serve`` takes it.
    Raises ArgumentTypeError: it is neither."""
    name, equals, path = text.partition("=")
    try:
        if equals and not text.lstrip().startswith("{"):
            adapter = Adapter(name=name, path=path)
        else:
            adapter = Adapter.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or text
        raise argparse.ArgumentTypeError(
            f"{text} is neither name=path nor JSON with name and path: {where}: {first['msg']}"
        ) from error
    return _placed(adapter)


def _placed(adapter: Adapter) -> Adapter:
    """Make the path absolute: frontends hash it too."""
    if Path(adapter.path).is_dir():
        return adapter.model_copy(update={"path": str(Path(adapter.path).absolute())})
    return adapter


class Adapters:
    """Adapters of the engine, in the order of loading.

    Attributes:
        slots: adapters that the engine computes with at once.
        changes: number of changes of ``known`` since the start.
        active: the last ``slots`` adapters used, most recent last. vLLM keeps the same LRU but does
            not report it.
    """

    def __init__(self, known: Sequence[Adapter] = ()) -> None:
        self.known = tuple(known)
        self.slots = 1
        self.changes = 0
        self.active: tuple[str, ...] = ()
        self._ids = itertools.count(1)
        self._requests = {adapter.name: self._request(adapter) for adapter in known}
        self._former: Lru[tuple[str, str], LoRARequest] = Lru(MAX_FORMER)

    def _request(self, adapter: Adapter) -> LoRARequest:
        return LoRARequest(
            lora_name=adapter.name,
            lora_int_id=next(self._ids),
            lora_path=adapter.path,
            base_model_name=adapter.base_model_name,
            is_3d_lora_weight=adapter.is_3d_lora_weight,
        )

    def check(self, *, enabled: bool, taken: Sequence[str]) -> None:
        """Check names before loading; ``taken`` are the model's. Raises ConfigurationError."""
        if self.known and not enabled:
            raise ConfigurationError("--lora-modules needs --enable-lora")
        if len(self._requests) < len(self.known):
            raise ConfigurationError("--lora-modules: two adapters have the same name")
        for name in self._requests:
            if name in taken:
                raise ConfigurationError(f"--lora-modules: {name} is the name of the model")

    async def load(self, add: Callable[[LoRARequest], Awaitable[object]]) -> None:
        """Load all adapters, with one ``add`` call each. Raises ConfigurationError: one can't be
        loaded. Raises EngineGoneError: the engine died."""
        for name, request in self._requests.items():
            try:
                loaded = await add(request)
            except (ValueError, RuntimeError) as error:  # the engine's errors about the files
                raise ConfigurationError(f"adapter {name} can't be loaded: {error}") from error
            if not loaded:
                raise ConfigurationError(f"adapter {name} can't be loaded")
            self._used(name)

    def _wanted(self, wanted: LoadLoraAdapter, taken: Sequence[str]) -> Adapter:
        """Return the adapter to load. Raises OperationRefusedError: the worker can't load it."""
        name = wanted.lora_name
        try:
            adapter = Adapter(
                name=name,
                path=wanted.lora_path,
                base_model_name=wanted.base_model_name,
                is_3d_lora_weight=wanted.is_3d_lora_weight,
            )
        except ValidationError as error:
            raise OperationRefusedError(f"adapter {name!r}: {error.errors()[0]['msg']}") from error
        if name in taken:
            raise OperationRefusedError(has_the_models_name(name))
        known = name in self._requests
        if known and not wanted.load_inplace:
            raise OperationRefusedError(has_adapter_already(name))
        if not known and len(self.known) >= MAX_ADAPTERS:
            raise OperationRefusedError(f"it has {MAX_ADAPTERS} adapters already")
        return _placed(adapter)

    async def add(
        self,
        wanted: LoadLoraAdapter,
        add: Callable[[LoRARequest], Awaitable[object]],
        taken: Sequence[str],
    ) -> None:
        """Load one more adapter with ``add``; ``taken`` are the model's names. Raises
        OperationRefusedError: nothing was done. Also raises the engine's errors about the files."""
        adapter = self._wanted(wanted, taken)
        name, known = adapter.name, self._requests.get(adapter.name)
        request = self._request(adapter)
        if known is not None:
            request.lora_int_id, request.load_inplace = known.lora_int_id, True
        if not await add(request):
            raise RuntimeError(f"adapter {name} can't be loaded")
        request.load_inplace = False  # or each request would read its files
        if known is not None:
            self._remember(known, request)
        self._requests[name] = request
        self.known = (*(each for each in self.known if each.name != name), adapter)
        self.changes += 1
        self._used(name)

    def forget(self, unwanted: UnloadLoraAdapter) -> None:
        """Stop offering an adapter. As below vLLM's own server, the engine keeps it for running
        requests and evicts it when it needs the slot. Raises OperationRefusedError: there is no
        such adapter."""
        name = unwanted.lora_name
        gone = self._requests.pop(name, None)
        if gone is None:
            raise OperationRefusedError(has_no_adapter(name))
        self._remember(gone, gone)
        self.known = tuple(each for each in self.known if each.name != name)
        self.active = tuple(each for each in self.active if each != name)
        self.changes += 1

    def _remember(self, gone: LoRARequest, instead: LoRARequest) -> None:
        """Keep serving requests that frontends sent before they heard of the removal."""
        self._former.put((gone.lora_name, gone.lora_path), instead)

    def _used(self, name: str) -> None:
        if self.active[-1:] != (name,):
            others = (each for each in self.active if each != name)
            self.active = (*others, name)[-self.slots :]

    def named(self, asked: LoRARequest | None) -> LoRARequest | None:
        """Return the engine's own request for an adapter. Raises RequestRejectedError: unknown."""
        if asked is None:
            return None
        name, path = asked.lora_name, asked.lora_path
        own = self._requests.get(name)
        if own is not None and own.lora_path == path:
            self._used(name)
            return own
        if (former := self._former.get((name, path))) is None:
            raise RequestRejectedError("this worker has no such adapter")
        return former


def check_files(adapter: LoRARequest) -> None:
    """Check that an adapter's files exist, or raise WorkerBusyError. Blocks. An engine that evicted
    an adapter reads it again for a request, and dies if it can't."""
    path = Path(adapter.lora_path)
    if path.is_absolute() and not (path / "adapter_config.json").is_file():
        raise WorkerBusyError(f"the files of adapter {adapter.lora_name} are gone from {path}")
