"""On a CPU no adapter changes the answers of its base model."""

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from backend_worker.engine.vllm_faults import cpu_adapters  # noqa: F401


def test_tokens_without_an_adapter_have_none_beside_some_with() -> None:
    for is_prefill in (True, False):
        wrapper = PunicaWrapperCPU(8, 2, "cpu")
        mapping = LoRAMapping((0, 1) if not is_prefill else (0, 1, 1), (0, 1), is_prefill)
        wrapper.update_metadata(mapping, [1], 1, 32)
        said = torch.zeros(2 + is_prefill, 4)
        down, up = (torch.ones(1, 1, *shape) for shape in ((8, 6), (4, 8)))
        wrapper.add_lora_linear(said, torch.ones(2 + is_prefill, 6), (down,), (up,), 1.0, (4,))
        assert said[:, 0].tolist() == [0.0] + [48.0] * (1 + is_prefill)
