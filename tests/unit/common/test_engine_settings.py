"""What a card says of an engine's KV cache, from vLLM's own configuration of it. No engine."""

import json
from pathlib import Path

import pytest
from transformers import Glm4MoeConfig, LlamaConfig
from vllm import AsyncEngineArgs
from vllm.model_executor.models import registry

from backend_worker.args import parse
from backend_worker.engine.config import engine_config, with_our_defaults
from common.request_plane.card import PrefixReuse
from common.vllm_compat.engine_settings import prefix_reuse

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model, and of one that drafts for it."""
    directory = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    for name in ("model", "draft"):
        LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(directory / name)
    experts = {"n_routed_experts": 2, "num_nextn_predict_layers": 1, "moe_intermediate_size": 64}
    config = Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], **sizes, **experts)
    config.save_pretrained(directory / "with-its-own-draft")
    return directory


@pytest.fixture(autouse=True)
def models_inspected_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts a process for each class of a model that it has not seen: 10 s each."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


def test_a_directory_has_one_name(model: Path) -> None:
    args = AsyncEngineArgs(model=f"{model}/draft/../model")
    assert with_our_defaults(args, frozenset()).model == str(model / "model")


@pytest.mark.parametrize(
    ("drafting", "drops"),
    [
        (None, False),
        (NGRAM, False),
        (MTP, True),
        ({"method": "eagle", "model": "draft", "num_speculative_tokens": 2}, True),
        (
            {
                "method": "eagle",
                "model": "draft",
                "num_speculative_tokens": 2,
                "disable_eagle_block_drop": True,
            },
            False,
        ),
    ],
)
def test_drafting_from_hidden_states_drops_the_last_block(
    model: Path, drafting: dict[str, object] | None, drops: bool
) -> None:
    name = "with-its-own-draft" if drafting == MTP else "model"
    flags = [f"--model={model / name}", "--skip-tokenizer-init", "--load-format=dummy"]
    if drafting is not None:
        if "model" in drafting:
            drafting = drafting | {"model": str(model / "draft")}
        flags.append(f"--speculative-config={json.dumps(drafting)}")
    args = parse(flags)
    config = engine_config(with_our_defaults(args.engine, args.engine_given))
    assert prefix_reuse(config) == PrefixReuse(
        drops_last_block=drops, drops_in_windows=drafting not in (None, MTP), keeps_tails=True
    )


def test_what_windows_keep_is_the_flags(model: Path) -> None:
    args = parse([f"--model={model / 'model'}", "--skip-tokenizer-init", "--load-format=dummy"])
    args.engine.prefix_cache_retention_interval = None  # ``--prefix-cache-retention-interval=None``
    assert not prefix_reuse(engine_config(args.engine)).keeps_tails
