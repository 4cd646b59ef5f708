"""No flag and no variable slips by docs/security.md: it says what each opens, or each is among
those of which somebody decided that they open nothing to clients."""

import dataclasses
import re
from pathlib import Path

import pytest
import vllm
from vllm import AsyncEngineArgs

from backend_worker import args as worker
from common.cli import vllm_flags
from common.cli.command_line import flags_of
from common.vllm_compat import engine_arguments
from frontend import args as frontend
from setup.vllm_map import ROOT
from tests.by_version import NOT_HERE

VARIABLE = re.compile(r"envs\.(VLLM_\w+)")
LAUNCHERS = ("cli", "launchers")
"""Of vLLM's server, that a frontend does not run."""

OPEN_NOTHING = {
    "frontend": """
        --anthropic-disabled-thinking-effort --api-key --api-key-file --api-server-count
        --body-memory-mb --body-timeout --chat-template --chat-template-content-format
        --cohere-format --cohere-is-reasoning-model --config --default-chat-template-kwargs
        --disable-access-log-for-endpoints --disable-fastapi-docs --disable-uvicorn-access-log
        --discovery --drain-timeout --enable-auto-tool-choice
        --enable-force-include-usage --enable-offline-docs --enable-ssl-refresh
        --exclude-tools-when-tool-choice-none --fingerprint-mode --fingerprint-value
        --fleet-key-file --hf-token --isolate-api-keys --key-share --log-format
        --log-level --max-body-mb --max-choices --max-connections --max-inflight --max-log-len
        --max-models --max-pooling-inputs --media-cache-mb --media-decode-timeout
        --media-decoding-megapixels --media-held-mb --media-max-mb --media-max-per-request
        --media-max-pixels --media-max-processor-mb --media-max-request-mb
        --media-max-request-megapixels --media-timeout --migration-limit
        --mm-arena-gb --mm-processor-cache-gb --nvtx --output-timeout
        --pooling-memory-mb --port --preprocess-workers --processes
        --reasoning-effort-map --reasoning-parser --renderer-num-workers --request-timeout
        --response-role --return-tokens-as-token-ids
        --router-busy-blocks-fraction --router-busy-prefill-tokens --router-eject-base
        --router-mode --router-stall --send-timeout --served-model-name
        --shutdown-timeout --sse-keep-alive-interval --ssl-ca-certs --ssl-cert-reqs --ssl-certfile
        --ssl-ciphers --ssl-keyfile --tool-call-parser --tool-strict-level --uvicorn-log-level
        --worker-wait
    """,
    "worker": """
        --additional-config --aggregate-engine-logging --all2all-backend
        --allow-deprecated-quantization --async-scheduling --attention-backend --attention-config
        --aux-output-config --block-size --code-revision --collect-detailed-traces
        --compilation-config --config --config-format --convert --cp-kv-cache-interleave-size
        --cpu-distributed-timeout-seconds --cpu-offload-gb --cpu-offload-params
        --cudagraph-capture-sizes --cudagraph-metrics --custom-histogram-buckets
        --data-parallel-backend --data-parallel-external-lb --data-parallel-hybrid-lb
        --data-parallel-rank --data-parallel-rpc-port --data-parallel-size
        --data-parallel-size-local --data-parallel-start-rank --dbo-decode-token-threshold
        --dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size
        --dcp-q-replicate --decode-context-parallel-size --device-ids --diffusion-config
        --disable-cascade-attn --disable-chunked-mm-input --disable-custom-all-reduce
        --disable-hybrid-kv-cache-manager --disable-log-stats --disable-nccl-for-dp-synchronization
        --disable-sliding-window --discovery --distributed-timeout-seconds
        --download-dir --dp-sync-interval --drain-timeout --dtype --ec-manager-config
        --elastic-ep-max-dp-size --enable-batch-sharded-sampling --enable-chunked-prefill
        --enable-cumem-allocator --enable-dbo --enable-ep-weight-filter --enable-eplb
        --enable-expert-parallel --enable-flashinfer-autotune --enable-hc-sp
        --enable-layerwise-nvtx-tracing --enable-logging-iteration-details
        --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint
        --enable-mfu-metrics --enable-mixed-moe-lora-format --enable-mm-processor-stats
        --enable-moe-shared-loras --enable-nccl-comm-suspend --enable-prefix-caching
        --enable-return-routed-experts --enable-shm-tensor-arena --encoder-cache-tokens
        --enforce-eager --engram-config --eplb-config --expert-placement-strategy
        --fail-on-environ-validation --fault-tolerance-config --fleet-key-file --fully-sharded-loras
        --gdn-prefill-backend --generation-config --gpu-memory-utilization --hf-config-path
        --hf-overrides --hf-token --ignore-patterns --interleave-mm-strings --ir-op-priority
        --jit-monitor-mode --jit-monitor-verbose --kda-decode-backend --kda-prefill-backend
        --kernel-config --kv-cache-dtype --kv-cache-dtype-skip-layers --kv-cache-memory-bytes
        --kv-cache-metrics --kv-cache-metrics-sample --kv-offloading-backend --kv-offloading-size
        --kv-sharing-fast-prefill --language-model-only --limit-mm-per-prompt --linear-backend
        --load-format --log-format --log-level --logprobs-mode --long-prefill-token-threshold
        --long-prefill-token-threshold-adaptive --lora-dtype --lora-target-modules --mamba-backend
        --mamba-block-size --mamba-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds
        --mamba-config --mamba-ssm-cache-dtype --mamba-ssu-algorithm --master-port --max-cpu-loras
        --max-cudagraph-capture-size --max-logprobs --max-lora-cls-labels --max-lora-rank
        --max-loras --max-model-len --max-num-active-seqs --max-num-batched-tokens
        --max-num-queued-reqs --max-num-queued-tokens --max-num-scheduled-tokens --max-num-seqs
        --max-parallel-loading-workers --media-io-kwargs --mm-device-do-normalize
        --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
        --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-tp-mode
        --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-processor-cache-gb
        --mm-processor-cache-type --mm-processor-device --mm-processor-kwargs
        --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model --model-impl
        --model-loader-extra-config --model-weights --moe-backend --monokernel
        --nixl-memory-mb --nnodes --node-rank --num-gpu-blocks-override --numa-bind --numa-bind-cpus
        --numa-bind-nodes --nvtx --offload-backend --offload-group-size --offload-num-in-group
        --offload-params --offload-prefetch-step --optimization-level --override-generation-config
        --per-request-spec-decode-metrics --performance-mode --pipeline-parallel-size
        --pooler-config --prefill-context-parallel-size --prefill-schedule-interval
        --prefix-cache-retention-interval --prefix-caching-hash-algo --prefix-match-unit
        --pt-load-map-location --quantization --quantization-config --ray-workers-use-nsight
        --reasoning-config --reasoning-parser --renderer-num-workers --replayssm-buffer-len
        --return-sampling-mask --revision --runner --safetensors-load-strategy
        --safetensors-prefetch-block-size --safetensors-prefetch-num-threads
        --scheduler-reserve-full-isl --seed --served-model-name
        --show-hidden-metrics-for-version --shutdown-timeout --skip-mm-profiling
        --skip-tokenizer-init --sleep-mode-backend --sleep-mode-offload-cudagraph
        --sleep-preserve-parameter-names --sparse-indexer-topk-backend --spec-method --spec-model
        --spec-tokens --specialize-active-lora --speculative-config --stream-interval
        --structured-outputs-config --swa-bounded-replay --tensor-parallel-size --tokenizer
        --tokenizer-mode --tokenizer-revision --ubatch-size --use-fp64-gumbel --use-replayssm
        --use-tqdm-on-load --video-pruning-method --video-pruning-rate --watchdog-config --watermark
        --worker-id --worker-port
    """,
    "variables": """
        VLLM_API_KEY VLLM_DISABLE_LOG_LOGO VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
        VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_N_SEQUENCES
        VLLM_MAX_STOP_STRINGS VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE
        VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
        VLLM_USE_RUST_FRONTEND VLLM_VIDEO_FETCH_TIMEOUT
    """,
}
"""Those that bound, name, log less, or say how something is computed or kept."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def of_frontends() -> set[str]:
    theirs = vllm_flags.SERVER.keys() | vllm_flags.ENGINE_AT_FRONTEND.keys()
    return {flag(name) for name in theirs - NOT_HERE} | flags_of(frontend.GROUPS)


def of_workers() -> set[str]:
    theirs = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    theirs |= vllm_flags.SERVER_AT_WORKER.keys() | engine_arguments.ON_CARD.keys()
    taken = theirs - engine_arguments.REFUSED.keys() - NOT_HERE
    return {flag(name) for name in taken if name[0] != "_"} | flags_of(worker.GROUPS)


def variables() -> set[str]:
    """Of vLLM's, that its server reads."""
    server = Path(vllm.__file__).parent / "entrypoints"
    files = [
        file for file in server.rglob("*.py") if file.relative_to(server).parts[0] not in LAUNCHERS
    ]
    assert len(files) > 100
    return {name for file in files for name in VARIABLE.findall(file.read_text())}


KNOWN = {"frontend": of_frontends, "worker": of_workers, "variables": variables}


def on_the_page() -> set[str]:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## What each opening flag opens")[2].partition("\n## ")[0]
    return set(re.findall(r"`(--[\w-]+|VLLM_\w+)", table))


@pytest.mark.parametrize("kind", KNOWN)
def test_each_is_on_the_page_or_opens_nothing(kind: str) -> None:
    known, listed, page = KNOWN[kind](), set(OPEN_NOTHING[kind].split()), on_the_page()
    assert known - listed - page == set(), "what does it open to clients? docs/security.md"
    assert listed & page == set()
    gone = {name for name in listed - known if name[0] == "-"}
    assert {name for name in gone if name[2:].replace("-", "_") not in NOT_HERE} == set()


def test_the_page_names_nothing_that_there_is_not() -> None:
    flags = {name for name in on_the_page() if name[0] == "-"}
    assert flags - of_frontends() - of_workers() == set()
