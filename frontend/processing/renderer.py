"""vLLM's renderer for a card, without a GPU.

The frontend and each of its media processes have one.
"""

from argparse import Namespace

from vllm import AsyncEngineArgs
from vllm.config import (
    CacheConfig,
    PoolerConfig,
    ReasoningConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.renderers import BaseRenderer, renderer_from_config

from common.errors import ConfigurationError
from common.request_plane.card import ModelSettings, OutputSettings, WorkerCard
from common.vllm_compat.engine_settings import apply_environment, model_settings

NEEDS_MODEL_RUNNER = ("return_sampling_mask", "enable_trace_replay")
"""Settings that vLLM's configuration refuses with its older model runner."""


class CardConfig(VllmConfig):
    """vLLM's configuration, with the worker's model runner: vLLM asks the platform, here a CPU."""

    use_v2_model_runner = False


def build_config(card: WorkerCard, serve_args: Namespace) -> VllmConfig:
    """Build vLLM's configuration without a device, as its GPU-less renderer does.

    The card replaces vLLM's arguments. Raises ConfigurationError if the model's files can't be read
    here, the card can't be followed or contradicts the arguments, or the operator does not trust
    the model's own code.
    """
    if card.model.trust_remote_code and not serve_args.trust_remote_code:
        raise ConfigurationError(
            f"{card.model.model} brings code of its own, and only --trust-remote-code lets it run "
            "in this frontend"
        )
    _apply(card, serve_args)
    args = AsyncEngineArgs.from_cli_args(serve_args)
    try:
        config = _make_config(card, args)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"worker {card.worker_id} serves {card.model.model}, "
            f"whose configuration can't be read on this machine: {error}"
        ) from error
    # Selects the cache that keeps tensors: with a single API process vLLM assumes that an engine
    # next to it keeps them, and returns None for a repeated image.
    config.parallel_config._api_process_count = 2
    for name in NEEDS_MODEL_RUNNER:
        setattr(config.model_config, name, getattr(card.model, name))
    config.use_v2_model_runner = card.capacity.use_v2_model_runner
    _check_equal(card, model_settings(config.model_config))
    return config


def _make_config(card: WorkerCard, args: AsyncEngineArgs) -> CardConfig:
    model_config = args.create_model_config()
    # No weights and no model runner here, so nothing to validate them against.
    model_config.quantization = None
    for name in NEEDS_MODEL_RUNNER:
        setattr(model_config, name, False)
    return CardConfig(
        model_config=model_config,
        cache_config=CacheConfig(enable_prefix_caching=card.cache.enable_prefix_caching),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=model_config.is_encoder_decoder,
            max_num_batched_tokens=card.capacity.max_num_batched_tokens,
            max_num_seqs=card.capacity.max_num_seqs,
        ),
        logging_config=args.create_logging_config(),
        structured_outputs_config=args.create_structured_outputs_config(),
        reasoning_config=_reasoning(card.output),
    )


def _apply(card: WorkerCard, serve_args: Namespace) -> None:
    """Apply the card to vLLM's arguments and this process's environment."""
    given = serve_args.model_class_overrides or {}
    if given != card.model.model_class_overrides:
        raise ConfigurationError(
            f"worker {card.worker_id} has model.model_class_overrides "
            f"{card.model.model_class_overrides}, this frontend {given}: a card can't have code "
            "loaded, so give --model-class-overrides to both"
        )
    for name, value in card.model.model_dump().items():
        setattr(serve_args, name, value)
    if card.model.pooler_config is not None:
        serve_args.pooler_config = PoolerConfig(**card.model.pooler_config)
    serve_args.mm_processor_device = "auto"  # it is in mm_processor_kwargs
    if serve_args.served_model_name is None:
        serve_args.served_model_name = card.served_model_names
    serve_args.structured_outputs_config = _structured_outputs(card, serve_args)
    serve_args.reasoning_parser = serve_args.structured_outputs_config.reasoning_parser
    apply_environment(card.environment)


def _structured_outputs(card: WorkerCard, serve_args: Namespace) -> StructuredOutputsConfig:
    """Return the worker's settings, with the frontend's own parser if the worker has none."""
    own: StructuredOutputsConfig = serve_args.structured_outputs_config
    ours, theirs = serve_args.reasoning_parser or own.reasoning_parser, card.output.reasoning_parser
    if ours and theirs and ours != theirs:
        raise ConfigurationError(
            f"worker {card.worker_id} has --reasoning-parser={theirs}, this frontend {ours}"
        )
    return StructuredOutputsConfig(
        backend=card.output.backend,
        disable_any_whitespace=card.output.disable_any_whitespace,
        disable_additional_properties=card.output.disable_additional_properties,
        enable_in_reasoning=card.output.enable_in_reasoning,
        reasoning_parser=theirs or ours,
        reasoning_parser_plugin=own.reasoning_parser_plugin,
    )


def _reasoning(output: OutputSettings) -> ReasoningConfig | None:
    """Return the reasoning settings, without which vLLM refuses budgets for reasoning."""
    if not (output.reasoning_parser or output.reasoning_end_str):
        return None
    return ReasoningConfig(
        reasoning_parser=output.reasoning_parser,
        reasoning_start_str=output.reasoning_start_str,
        reasoning_end_str=output.reasoning_end_str,
    )


def _check_equal(card: WorkerCard, made: ModelSettings) -> None:
    """Raise ConfigurationError for a setting that changed: answers would be silently wrong."""
    for name in ModelSettings.model_fields:
        here, there = getattr(made, name), getattr(card.model, name)
        if here != there:
            raise ConfigurationError(
                f"worker {card.worker_id} has model.{name} {there!r}, but on this machine "
                f"vLLM makes it {here!r}, so answers would be wrong"
            )


def build_renderer(card: WorkerCard, serve_args: Namespace) -> BaseRenderer:
    """Load tokenizer and processor: seconds. Arguments and errors of :func:`build_config`."""
    return renderer_from_config(build_config(card, serve_args))
