"""How an engine of ours is configured."""

from vllm.config import VllmConfig

from backend_worker.args import parse
from backend_worker.engine.config import engine_config, with_our_defaults


def ours(flags: list[str]) -> VllmConfig:
    """By a worker's flags."""
    args = parse(flags)
    engine = with_our_defaults(args.engine, args.engine_given)
    return engine_config(engine, args.worker.encoder_cache_tokens)
