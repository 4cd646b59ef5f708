"""Configure ``ECCPUConnector``, which keeps encodings of media in host memory.

Source: ``ECCPUConnector`` of vLLM 0.32.0 and 0.33.0.
"""

import os
import shutil
from typing import Final

import torch
from vllm.config import VllmConfig

from backend_worker.engine.memory import SHARED_MEMORY, instance_name
from common.errors import ConfigurationError
from common.request_plane.operations import Operation, ReloadWeights, ResetEncoderCache, Sleep
from common.vllm_compat.engine_arguments import HOST_MEMORY
from common.vllm_compat.engine_settings import embeds_width

INSTANCE: Final = "mmrouter_instance"
"""In the connector's configuration: the name of the engine's memory."""

_OURS: Final = "HostEncodings"

_MOST: Final = 1 << 32
"""Tokens that a card can say."""


def take_over(config: VllmConfig) -> None:
    """Have an engine use our connector where it would use vLLM's.

    Raises:
        ConfigurationError: there is no room for what it should keep.
    """
    connector = config.ec_transfer_config
    if connector is None or connector.ec_connector != HOST_MEMORY:
        return
    extra = connector.ec_connector_extra_config
    _check_room(config, extra.get("ec_cpu_bytes", 0))
    connector.ec_connector = _OURS
    connector.ec_connector_module_path = "backend_worker.engine.host_encodings"
    connector.ec_connector_extra_config = {**extra, INSTANCE: instance_name(os.getpid())}


def _check_room(config: VllmConfig, wanted: object) -> None:
    least = token_bytes(config, config.model_config.get_inputs_embeds_size())
    if not isinstance(wanted, int) or wanted < least:
        raise ConfigurationError(
            f"--ec-transfer-config: ec_cpu_bytes is {wanted!r}, and has to be a number of bytes: "
            f"each media token takes {least} or more"
        )
    ranks = config.parallel_config.data_parallel_size_local
    free = shutil.disk_usage(SHARED_MEMORY).free
    if wanted * ranks > free:
        raise ConfigurationError(
            f"--ec-transfer-config: {SHARED_MEMORY} has {free} bytes left, and {ranks} times "
            f"ec_cpu_bytes are {wanted * ranks}"
        )


def token_bytes(config: VllmConfig, width: int) -> int:
    """Of a media token's encoding, so wide."""
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved
    return width * dtype.itemsize


def kept_tokens(config: VllmConfig) -> int:
    """Media tokens whose encodings an engine keeps, wherever that is: about as many, of models
    that encode them wider than one can know before.
    """
    own = config.scheduler_config.encoder_cache_size
    connector = config.ec_transfer_config
    if connector is None:
        return own
    room: int = connector.ec_connector_extra_config["ec_cpu_bytes"]
    width = embeds_width(config.model_config, "image")
    return min(max(own, room // token_bytes(config, width)), _MOST)


def refuses(config: VllmConfig, operation: Operation) -> str:
    """Why an engine does not do an operation that encodings in the host's memory would survive."""
    survived = isinstance(operation, ReloadWeights | ResetEncoderCache) or (
        isinstance(operation, Sleep) and operation.level > 1
    )
    if not survived or config.ec_transfer_config is None:
        return ""
    return (
        "the connector of --ec-transfer-config would keep the encodings of these weights: "
        "restart the worker"
    )
