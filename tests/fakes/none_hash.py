"""The parent of first blocks, as an engine in this process would derive it."""

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils


def none_hash_for(algorithm: str) -> bytes:
    """Return the parent hash of first blocks; sets vLLM's module-wide ``NONE_HASH`` to it.

    Honours ``PYTHONHASHSEED`` of this process, as vLLM does of its own.
    """
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    return bytes(kv_cache_utils.NONE_HASH)
