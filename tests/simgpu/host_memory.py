"""Encodings in host memory: vLLM's own bookkeeping, without the copies that a device would make."""

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.common import (
    ECCPUConnectorMetadata,
    ECCPUWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput


def install() -> None:
    """Have the engine of this process do without the connector's other half, which is a device's:
    here it is :func:`copied`.
    """
    setattr(ECCPUConnector, "__init__", _without_a_device)  # noqa: B010  # mypy knows it as a method


def _without_a_device(
    connector: ECCPUConnector, vllm_config: VllmConfig, role: ECConnectorRole
) -> None:
    # Past its own constructor, which wants the model runner of a device.
    ECConnectorBase.__init__(connector, vllm_config=vllm_config, role=role)
    connector.connector_worker = None
    connector.connector_scheduler = connector._make_scheduler(vllm_config)


def loaded(scheduled: SchedulerOutput) -> tuple[int, int]:
    """Media whose encodings come from host memory in a step, and their tokens."""
    metadata = scheduled.ec_connector_metadata
    if not isinstance(metadata, ECCPUConnectorMetadata):
        return 0, 0
    return len(metadata.loads), sum(shape[0] for _, _, shape in metadata.loads.values())


def copied(scheduled: SchedulerOutput) -> ECConnectorOutput | None:
    """What a device says at the end of a step: that all its copies are made."""
    metadata = scheduled.ec_connector_metadata
    if not isinstance(metadata, ECCPUConnectorMetadata):
        return None
    loads = [transfer for transfer, _, _ in metadata.loads.values()]
    if not (metadata.saves or loads):
        return None
    made = ECCPUWorkerMetadata(completed_saves=[*metadata.saves], completed_loads=loads)
    return ECConnectorOutput(ec_connector_worker_meta=made)
