"""Media items for tests: any item, and images whose pixels tell whose they are."""

import torch
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from common.identity import MmHash

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]

FIELDS = [
    MultiModalFieldConfig.batched("image").field,
    MultiModalFieldConfig.batched("image", keep_on_cpu=True).field,
    MultiModalFieldConfig.shared("image", 3).field,
    MultiModalFieldConfig.flat("image", [slice(0, 3), slice(3, 7)]).field,
    MultiModalFieldConfig.flat("image", [(slice(None), slice(0, 3, 2))], dim=1).field,
]


def image(seed: int, rows: int = 64, columns: int = 1176) -> MultiModalKwargsItem:
    """An image as Qwen2-VL's processor gives it, all of whose pixels are ``seed % 251``."""
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(
                data=torch.full((rows, columns), seed % 251, dtype=torch.uint8),
                field=MultiModalFieldConfig.flat("image", [slice(0, rows)]).field,
            ),
            "image_grid_thw": MultiModalFieldElem(
                data=torch.tensor([1, seed, rows]),
                field=MultiModalFieldConfig.batched("image", keep_on_cpu=True).field,
            ),
        }
    )


def image_hash(seed: int) -> MmHash:
    return MmHash(f"{seed:064x}")


def is_image(item: MultiModalKwargsItem, seed: int) -> bool:
    """Whether every pixel, and the grid, are those of ``image(seed)``."""
    pixels = item["pixel_values"].data
    return bool((pixels == seed % 251).all()) and int(item["image_grid_thw"].data[1]) == seed


def tensors_of(data: object) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, list | tuple):
        return [tensor for each in data for tensor in tensors_of(each)]
    return []


def same(one: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    """Whether two items agree in every name, field, shape, dtype and bit."""
    return list(one) == list(other) and all(
        one[key].field == other[key].field and _same_data(one[key].data, other[key].data)
        for key in one
    )


def _same_data(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(_same_data, one, other))
        )
    return one == other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Not a comparison of values: NaN is not equal to itself.
    return tensor.contiguous().flatten().view(torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    count = 1
    for size in shape:
        count *= size
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) + draw(st.integers(0, 255))
    raw = (raw % (2 if dtype == torch.bool else 256)).to(torch.uint8)
    tensor = raw.view(dtype).view(shape)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    return tensor


def items() -> st.SearchStrategy[MultiModalKwargsItem]:
    data = st.recursive(
        tensors(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    ) | st.one_of(st.none(), st.integers(-(2**31), 2**31), st.floats(allow_nan=False))
    elements = st.builds(MultiModalFieldElem, data=data, field=st.sampled_from(FIELDS))
    return st.dictionaries(st.text(max_size=12), elements, max_size=4).map(MultiModalKwargsItem)
