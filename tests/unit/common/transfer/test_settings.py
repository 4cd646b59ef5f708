from argparse import Namespace

import pytest

from common.errors import ConfigurationError
from common.transfer.settings import TransferSettings
from common.transfer.transports import TransferMode


def mode(**environ: str) -> TransferMode:
    return TransferSettings.from_args(Namespace(), environ).mode


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", TransferMode.AUTO),
        ("auto", TransferMode.AUTO),
        ("shm", TransferMode.SHM),
        (" NIXL ", TransferMode.NIXL),
    ],
)
def test_modes(value: str, expected: TransferMode) -> None:
    assert mode(DYNAMO_MM_TRANSFER=value) is expected


def test_unset_is_auto() -> None:
    assert mode() is TransferMode.AUTO


@pytest.mark.parametrize("value", ["rdma", "shm,nixl", "1", "inline", "disabled"])
def test_unknown_modes(value: str) -> None:
    with pytest.raises(ConfigurationError, match="DYNAMO_MM_TRANSFER"):
        mode(DYNAMO_MM_TRANSFER=value)


def test_transfer_can_be_turned_off_but_not_while_a_transport_is_named() -> None:
    assert mode(DYNAMO_DISABLE_NIXL_MM="1") is TransferMode.DISABLED
    assert mode(DYNAMO_DISABLE_NIXL_MM=" 1 ") is TransferMode.DISABLED
    assert mode(DYNAMO_DISABLE_NIXL_MM="0", DYNAMO_MM_TRANSFER="shm") is TransferMode.SHM
    with pytest.raises(ConfigurationError, match="turns transfer off"):
        mode(DYNAMO_DISABLE_NIXL_MM="1", DYNAMO_MM_TRANSFER="shm")
