"""What a client says of other servers that have worked on its request already.

vLLM's engines believe it: a connector asks the hosts that it names, and without one it is told as
fact how much was cached there. Frontends know no such split, so it is nobody's business.
"""

from typing import Final

from vllm.sampling_params import SamplingParams

_NAMES: Final = ("kv_transfer_params", "ec_transfer_params")


def drop_transfer_params(params: object) -> None:
    """Drop it.

    Args:
        params: of a request, changed in place; such that pool have none.
    """
    if isinstance(params, SamplingParams) and params.extra_args:
        kept = {name: value for name, value in params.extra_args.items() if name not in _NAMES}
        params.extra_args = kept or None


def names_encoder(params: object) -> bool:
    extra = params.extra_args if isinstance(params, SamplingParams) else None
    return bool(extra and extra.get("ec_transfer_params"))
