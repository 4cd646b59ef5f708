"""Encodings of media that an engine keeps beyond its encoder cache: in a connector of vLLM's.

Source: ``ECConnectorBase`` and ``ECCPUConnector`` of vLLM 0.32.0 and 0.33.0.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from backend_worker.supervise import descendants
from common.encoder_width import embeds_width
from common.errors import ConfigurationError
from common.operations import Operation, ReloadWeights, ResetEncoderCache, Sleep

HOST_MEMORY: Final = "ECCPUConnector"

_MOST: Final = 1 << 32
"""Tokens, where a connector doesn't say how many it has room for; cards have no larger number."""

_NAME: Final = re.compile(r"/dev/shm/vllm_ec_[^/]+_dp\d+\.mmap")
"""Of a file in which an engine keeps them."""


def has_connector(config: VllmConfig) -> bool:
    """Whether the engine's encodings outlive its encoder cache."""
    return config.ec_transfer_config is not None


def kept_tokens(config: VllmConfig) -> int:
    """Media tokens whose encodings an engine keeps, wherever that is."""
    own = config.scheduler_config.encoder_cache_size
    connector = config.ec_transfer_config
    if connector is None:
        return own
    if connector.ec_connector != HOST_MEMORY:
        return _MOST
    room = int(connector.get_from_extra_config("ec_cpu_bytes", 0)) // _token_bytes(config)
    return min(max(own, room), _MOST)


def check_room(config: VllmConfig, largest: int) -> None:
    """Refuse a connector of which an engine would end when the largest medium comes.

    Args:
        largest: media tokens of one, at most.

    Raises:
        ConfigurationError: says how much room there has to be.
    """
    connector = config.ec_transfer_config
    if connector is None or connector.ec_connector != HOST_MEMORY:
        return
    needed = largest * _token_bytes(config)
    if int(connector.get_from_extra_config("ec_cpu_bytes", 0)) < needed:
        raise ConfigurationError(
            f"--ec-transfer-config: ec_cpu_bytes has to be {needed} at least: a medium may have "
            f"{largest} tokens, and an engine ends with one that has no room"
        )


def _token_bytes(config: VllmConfig) -> int:
    """Of a media token's encoding."""
    model = config.model_config
    assert isinstance(model.dtype, torch.dtype)  # resolved
    return embeds_width(model, "image") * model.dtype.itemsize


def refuses(config: VllmConfig, operation: Operation) -> str:
    """Why an engine does not do an operation that a connector's encodings would survive."""
    survived = isinstance(operation, ReloadWeights | ResetEncoderCache) or (
        isinstance(operation, Sleep) and operation.level > 1
    )
    if not (survived and has_connector(config)):
        return ""
    return (
        "the connector of --ec-transfer-config would keep the encodings of these weights: "
        "restart the worker"
    )


def without_encoder(params: SamplingParams) -> None:
    """Drop what a client says of servers that have encoded its media: a connector would ask them.

    Args:
        params: changed in place.
    """
    if params.extra_args:
        params.extra_args.pop("ec_transfer_params", None)


def take_names() -> list[Path]:
    """Remove the names of the memory in which engines of this process keep encodings, so that it
    goes with them, however they end. Once they have started: they open it by name until then.

    Returns:
        The names.
    """
    found: set[Path] = set()
    for pid in descendants(os.getpid()):
        for opened in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                found.add(opened.readlink())
    names = sorted(each for each in found if _NAME.fullmatch(str(each)))
    for name in names:
        name.unlink(missing_ok=True)
    return names


@contextmanager
def names_back(files: Iterable[Path]) -> Iterator[None]:
    """Have engines find the names that were removed: to stop without one is an error to them."""
    ours: list[Path] = []
    for file in files:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            ours.append(file)
    try:
        yield
    finally:
        for file in ours:
            file.unlink(missing_ok=True)
