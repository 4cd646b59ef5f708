"""Keep media encodings in host memory, with a subclass of vLLM's ``ECCPUConnector``.

Engine processes import the connector from here, by their configuration.

Source: ``ECCPUConnector`` of vLLM 0.32.0 and 0.33.0.
"""

import copy
import os
import shutil
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.request import Request

from backend_worker.engine.ipc_names import SHARED_MEMORY, instance_name
from common.errors import ConfigurationError
from common.request_plane.operations import Operation, ReloadWeights, ResetEncoderCache, Sleep
from common.vllm_compat.engine_arguments import HOST_MEMORY
from common.vllm_compat.engine_settings import embeds_width

INSTANCE: Final = "mmrouter_instance"
"""In the connector's configuration: the name of the engine's memory."""

_OURS: Final = "HostEncodings"

_MOST: Final = 1 << 32  # limit of the card's field, in tokens


def take_over(config: VllmConfig) -> None:
    """Put our connector into the configuration. Raises ConfigurationError: too little memory."""
    connector = config.ec_transfer_config
    if connector is None or connector.ec_connector != HOST_MEMORY:
        return
    extra = connector.ec_connector_extra_config
    _check_room(config, extra.get("ec_cpu_bytes", 0))
    connector.ec_connector = _OURS
    connector.ec_connector_module_path = "backend_worker.engine.encodings"
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
    """Return the bytes of one media token's encoding of this width."""
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved
    return width * dtype.itemsize


def kept_tokens(config: VllmConfig) -> int:
    """Return the media tokens whose encodings an engine keeps, on the device or the host. An
    estimate for models that encode some media wider than the configuration says."""
    own = config.scheduler_config.encoder_cache_size
    connector = config.ec_transfer_config
    if connector is None:
        return own
    room: int = connector.ec_connector_extra_config["ec_cpu_bytes"]
    width = embeds_width(config.model_config, "image")
    return min(max(own, room // token_bytes(config, width)), _MOST)


def refuses(config: VllmConfig, operation: Operation) -> str:
    """Return why an engine refuses an operation that encodings in host memory would outlive."""
    survived = isinstance(operation, ReloadWeights | ResetEncoderCache) or (
        isinstance(operation, Sleep) and operation.level > 1
    )
    if not survived or config.ec_transfer_config is None:
        return ""
    return (
        "the connector of --ec-transfer-config would keep the encodings of these weights: "
        "restart the worker"
    )


class HostEncodings(ECCPUConnector):
    """ECCPUConnector with a known memory name. Skips too large media; vLLM's would crash."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        named = copy.copy(vllm_config)
        connector = vllm_config.ec_transfer_config
        assert connector is not None
        named.instance_id = connector.ec_connector_extra_config[INSTANCE]
        super().__init__(named, role)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Store a medium that is about to enter the encoder cache, or load its stored encoding."""
        if self._has_room(request.mm_features[index]):
            super().update_state_after_alloc(request, index)

    def _has_room(self, feature: MultiModalFeatureSpec) -> bool:
        config = self._vllm_config
        connector = config.ec_transfer_config
        assert connector is not None
        width = connector.mm_encoder_output_widths.get(feature.modality)
        if width is None:  # never encoded: the client sent embeddings
            return False
        block = token_bytes(config, config.model_config.get_inputs_embeds_size())
        room: int = connector.ec_connector_extra_config["ec_cpu_bytes"] // block * block
        return feature.mm_position.get_num_embeds() * token_bytes(config, width) <= room
