"""vLLM's connector that keeps encodings in the host's memory, as engines of ours have it.

Imported by the engine's processes, from its configuration.
"""

import copy

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.request import Request

from backend_worker.engine.encodings import INSTANCE, token_bytes


class HostEncodings(ECCPUConnector):
    """Its memory has a name that is known outside, and what has no room in it is not kept: vLLM's
    ends the engine then.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        named = copy.copy(vllm_config)
        connector = vllm_config.ec_transfer_config
        assert connector is not None
        named.instance_id = connector.ec_connector_extra_config[INSTANCE]
        super().__init__(named, role)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """A medium is about to be in the encoder cache: keep it, or copy what is kept."""
        if self._has_room(request.mm_features[index]):
            super().update_state_after_alloc(request, index)

    def _has_room(self, feature: MultiModalFeatureSpec) -> bool:
        config = self._vllm_config
        connector = config.ec_transfer_config
        assert connector is not None
        width = connector.mm_encoder_output_widths.get(feature.modality)
        if width is None:  # none of these was ever encoded: it is embeddings of a client's
            return False
        block = token_bytes(config, config.model_config.get_inputs_embeds_size())
        room: int = connector.ec_connector_extra_config["ec_cpu_bytes"] // block * block
        return feature.mm_position.get_num_embeds() * token_bytes(config, width) <= room
