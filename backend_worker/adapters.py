"""The LoRA adapters of a worker: read from ``--lora-modules``, loaded before it serves.

Requests name an adapter; which files that means the worker knows by itself.
"""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError
from vllm.lora.request import LoRARequest

from common.card import Adapter
from common.errors import ConfigurationError, RequestRejectedError


def read_adapter(text: str) -> Adapter:
    """One value of ``--lora-modules``, as ``vllm serve`` takes it: ``name=path`` or JSON.

    Raises:
        ArgumentTypeError: it is neither.
    """
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
    if Path(adapter.path).is_dir():
        return adapter.model_copy(update={"path": str(Path(adapter.path).absolute())})
    return adapter


class Adapters:
    """Adapters that the engine has.

    Attributes:
        known: in the order in which they were given.
    """

    def __init__(self, known: Sequence[Adapter] = ()) -> None:
        self.known = tuple(known)
        self._requests = {
            adapter.name: LoRARequest(
                lora_name=adapter.name,
                lora_int_id=number,
                lora_path=adapter.path,
                base_model_name=adapter.base_model_name,
                is_3d_lora_weight=adapter.is_3d_lora_weight,
            )
            for number, adapter in enumerate(known, 1)
        }

    def check(self, *, enabled: bool, taken: Sequence[str]) -> None:
        """Refuse what can't be served, before anything is loaded.

        Args:
            enabled: whether the engine takes adapters.
            taken: names of the model.

        Raises:
            ConfigurationError: says what is wrong.
        """
        if self.known and not enabled:
            raise ConfigurationError("--lora-modules needs --enable-lora")
        if len(self._requests) < len(self.known):
            raise ConfigurationError("--lora-modules: two adapters have the same name")
        for name in self._requests:
            if name in taken:
                raise ConfigurationError(f"--lora-modules: {name} is the name of the model")

    async def load(self, add: Callable[[LoRARequest], Awaitable[object]]) -> None:
        """Have the engine load all of them.

        Args:
            add: lets the engine load one.

        Raises:
            ConfigurationError: one can't be loaded.
            EngineGoneError: the engine died meanwhile.
        """
        for name, request in self._requests.items():
            try:
                loaded = await add(request)
            except (ValueError, RuntimeError) as error:  # whatever an engine says of its files
                raise ConfigurationError(f"adapter {name} can't be loaded: {error}") from error
            if not loaded:
                raise ConfigurationError(f"adapter {name} can't be loaded")

    def named(self, asked: LoRARequest | None) -> LoRARequest | None:
        """The engine's own of what a frontend asks for.

        Raises:
            RequestRejectedError: there is no such adapter here.
        """
        if asked is None:
            return None
        own = self._requests.get(asked.lora_name)
        if own is None or own.lora_path != asked.lora_path:
            raise RequestRejectedError("this worker has no such adapter")
        return own
