"""vLLM's renderer for a card, on a machine without a GPU.

The frontend has one, and so has each process that processes media for it.
"""

from argparse import Namespace

from vllm import AsyncEngineArgs, envs
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.renderers import BaseRenderer, renderer_from_config

from common.card import WorkerCard
from common.errors import ConfigurationError


def build_config(card: WorkerCard, serve_args: Namespace) -> VllmConfig:
    """vLLM's configuration without a device, the way its GPU-less renderer makes it.

    Args:
        card: the fleet's contract.
        serve_args: vLLM's own API server arguments; model arguments in it are replaced by
            the card's.

    Raises:
        ConfigurationError: the model's files can't be read here.
    """
    for name, value in card.model.model_dump().items():
        setattr(serve_args, name, value)
    if serve_args.served_model_name is None:
        serve_args.served_model_name = card.served_model_names
    args = AsyncEngineArgs.from_cli_args(serve_args)
    try:
        model_config = args.create_model_config()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"worker {card.worker_id} serves {card.model.model}, "
            f"whose configuration can't be read on this machine: {error}"
        ) from error
    model_config.quantization = None  # no weights here, so nothing to validate it against
    envs.VLLM_CPU_KVCACHE_SPACE = 0  # no KV cache here, so no warning about its size
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(enable_prefix_caching=card.cache.enable_prefix_caching),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=card.capacity.max_num_batched_tokens,
            max_num_seqs=card.capacity.max_num_seqs,
        ),
        logging_config=args.create_logging_config(),
        structured_outputs_config=args.create_structured_outputs_config(),
    )
    # Selects the cache that keeps tensors: with a single API process vLLM assumes
    # that an engine next to it keeps them, and returns None for a repeated image.
    config.parallel_config._api_process_count = 2
    return config


def build_renderer(card: WorkerCard, serve_args: Namespace) -> BaseRenderer:
    """Load tokenizer and processor: takes seconds. Arguments and errors as above."""
    return renderer_from_config(build_config(card, serve_args))
