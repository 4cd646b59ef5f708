"""The model of time: what a step costs, and the clock that makes the engine wait for it.

A step lasts::

    ( step_ms
    + prefill_ms × prompt tokens computed
    + encoder_ms × visual tokens encoded
    + context_ms × tokens of context of the running sequences
    + load_ms × visual tokens whose encodings come from host memory ) / speed

and steps queue up on one device. The defaults stand for Qwen2.5-VL-7B in bf16 on one H100. They
are estimates, made from NVIDIA's data sheet of the H100 SXM (989 TFLOP/s in bf16 without
sparsity, 3.35 TB/s) and the model's published configuration (7.6 billion parameters, 28 layers,
4 KV heads of 128), and were not measured:

- step: 15.2 GB of weights at 3.35 TB/s are 4.5 ms; the rest is launch and sampling.
- prefill: 15 GFLOP a token (twice the parameters) at 40 % of the peak.
- encoder: four patches of 1.35 GFLOP each make a visual token; at about 10 % of the peak, since
  the encoder's matrices are small and its attention is windowed.
- context: 57 KB of keys and values a token at 60 % of the bandwidth.
- load: 7 KB a token at 40 % of the 64 GB/s that PCIe 5 has in one direction. Copies to host memory
  go on beside the computation.
- KV tokens: 45 GB are left for them.

What is left out: prefill has no term that grows with the square of the length, and a step with both
prefill and decoding pays the weights and the computation one after the other. Long prompts come out
a little wrong, for all contenders alike.
"""

import os
import time
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class GpuModel:
    """Cost of a step in milliseconds; each field is the environment variable ``SIMGPU_<FIELD>``.

    Attributes:
        step_ms: any step.
        prefill_ms: a prompt token computed.
        encoder_ms: a visual token, after merging, encoded.
        context_ms: a token of context read by a running sequence.
        load_ms: a visual token whose encoding is copied from host memory.
        speed: divides all of the above.
        kv_tokens: capacity of the KV cache, unless ``--num-gpu-blocks-override`` says another.
    """

    step_ms: float = 8.0
    prefill_ms: float = 0.04
    encoder_ms: float = 0.06
    context_ms: float = 0.00003
    load_ms: float = 0.0003
    speed: float = 1.0
    kv_tokens: float = 800_000

    @classmethod
    def from_env(cls) -> Self:
        """Read the environment; what is not set keeps its default."""
        names = {field.name: _variable(field.name) for field in fields(cls)}
        return cls(**{k: float(os.environ[v]) for k, v in names.items() if os.environ.get(v)})

    def to_env(self) -> dict[str, str]:
        """What an engine must find in its environment to be like this."""
        return {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}

    def step_seconds(
        self, prefill_tokens: int, encoder_tokens: int, context_tokens: int, loaded_tokens: int = 0
    ) -> float:
        """How long a step lasts."""
        milliseconds = (
            self.step_ms
            + self.prefill_ms * prefill_tokens
            + self.encoder_ms * encoder_tokens
            + self.context_ms * context_tokens
            + self.load_ms * loaded_tokens
        )
        return milliseconds / 1000 / self.speed


def _variable(field: str) -> str:
    return f"SIMGPU_{field.upper()}"


class DeviceClock:
    """When the device is through with what it was given; steps run one after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def submit(self, seconds: float) -> tuple[float, float]:
        """Queue work behind what was queued before.

        Returns:
            When it ends, in monotonic seconds, and how long the device was idle before it.
        """
        now = time.monotonic()
        idle = max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at, idle

    @staticmethod
    def wait_until(end: float) -> float:
        """Sleep until ``end``; by how many seconds that came too late."""
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)
        return max(0.0, time.monotonic() - end)
