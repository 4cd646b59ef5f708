"""Faults of vLLM by which one request ends an engine, or changes other requests' answers: mended.

Each module replaces what it mends. An engine's process imports all, with the module of a class that
its configuration names.
"""

import backend_worker.engine.vllm_faults.cpu_adapters
import backend_worker.engine.vllm_faults.cpu_seeds
import backend_worker.engine.vllm_faults.cpu_strides
import backend_worker.engine.vllm_faults.structure_backends
import backend_worker.engine.vllm_faults.token_logprobs
import backend_worker.engine.vllm_faults.uneven_media
