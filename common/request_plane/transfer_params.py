"""Drop client-supplied transfer parameters.

vLLM's engines trust them: a connector contacts the hosts that they name, and without a connector
they set the cached token count. Frontends know no such split, so no client may set them.
"""

from typing import Final

from vllm.sampling_params import SamplingParams

_NAMES: Final = ("kv_transfer_params", "ec_transfer_params")


def drop_transfer_params(params: object) -> None:
    """Drop transfer parameters from ``params``, in place; pooling parameters have none."""
    if isinstance(params, SamplingParams) and params.extra_args:
        kept = {name: value for name, value in params.extra_args.items() if name not in _NAMES}
        params.extra_args = kept or None


def names_encoder(params: object) -> bool:
    extra = params.extra_args if isinstance(params, SamplingParams) else None
    return bool(extra and extra.get("ec_transfer_params"))
