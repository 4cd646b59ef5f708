"""What tensors a model takes, learned from what its HF processor makes of media without options.

A request that may choose how media are processed (``--trust-request-mm-kwargs``) can have tensors
made that no encoder takes, and vLLM's engine ends with the first of them. So it does with what
clients say of embeddings of their own (``--enable-mm-embeds``).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from vllm.config.multimodal import (
    MultiModalDummyOptions,
    VideoDummyOptions,
)
from vllm.multimodal.inputs import (
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    NestedTensors,
)
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from common.errors import RequestRejectedError
from frontend.processing.batch import Processor
from frontend.processing.client_embeds import are_embeds

_SIZES: Final = (
    (61, 97), (211, 353), (353, 211), (330, 290), (290, 330), (420, 370), (370, 420), (640, 480),
    (1024, 256), (250, 1000), (2048, 150), (150, 2048), (2048, 2048),
)  # fmt: skip
"""Unlike each other, so that models which have pictures of many sizes have many of these."""

_LARGEST: Final = 2048
"""A model that lets a picture be as large makes none smaller."""

_SEQ_LEN: Final = 4096
"""Of the prompt that vLLM's dummies are for; some models have shorter films in shorter ones."""

_FRAMES: Final = (2, 4, 6, 8, 10, 12)
"""Of a film; the first has pictures of the first size, and so on."""

_SOUNDS: Final = (9_000, 21_700, 50_300, 500_900, 800_500)
"""Lengths at 16 kHz. Some models have them in pieces of half a minute."""

_RATE: Final = 16_000

_MOST: Final = 2**20
"""Of anything that a client counts: three of them multiplied are no other number yet."""

_Kind = tuple[torch.dtype, int]
"""A type of tensors, and how many dimensions they have."""


class _Tensors:
    """What the tensors of one name were like."""

    def __init__(self) -> None:
        self._sizes: dict[_Kind, list[set[int]]] = {}
        self._counts = True
        self._steps: torch.Tensor | None = None
        self._fixed: torch.Tensor | None = None

    def learn(self, tensor: torch.Tensor) -> None:
        sizes = self._sizes.setdefault(_kind(tensor), [set() for _ in tensor.shape])
        for seen, size in zip(sizes, tensor.shape, strict=True):
            seen.add(size)
        if _sort(tensor.dtype) is int:
            self._counts &= bool((tensor > 0).all())
            if self._steps is None or self._fixed is None:
                self._steps = self._fixed = tensor
            elif tensor.shape == self._steps.shape:
                self._steps = torch.gcd(self._steps, tensor)
                self._fixed = torch.where(self._fixed == tensor, tensor, 0)

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether it is of numbers of the same sort, and as large where all were as large."""
        return any(
            ndim == tensor.ndim
            and _sort(dtype) == _sort(tensor.dtype)
            and all(
                len(seen) > 1 or size in seen
                for seen, size in zip(sizes, tensor.shape, strict=True)
            )
            for (dtype, ndim), sizes in self._sizes.items()
        )

    def counts_so(self, tensor: torch.Tensor) -> bool:
        """Whether its whole numbers may be what a processor counted: patches come in squares of
        some, an image has one frame, and nothing is less than one.
        """
        if _sort(tensor.dtype) is not int:
            return True
        if not ((tensor >= (1 if self._counts else -_MOST)) & (tensor <= _MOST)).all():
            return False
        steps, fixed = self._steps, self._fixed
        if not self._counts or steps is None or fixed is None or steps.shape != tensor.shape:
            return True
        return not ((tensor % steps != 0) | ((fixed > 0) & (tensor != fixed))).any()

    @property
    def looks(self) -> str:
        """For users: ``3 of torch.int64``."""
        return " or ".join(
            f"{'x'.join(str(*seen) if len(seen) == 1 else 'any' for seen in sizes) or 'one'} of "
            f"{dtype}"
            for (dtype, _), sizes in self._sizes.items()
        )

    def takes(self, tensor: torch.Tensor, counted: int | None, *, picture: bool) -> bool:
        """
        Args:
            counted: the dimension that has as much of it as vLLM says.
            picture: whether it is of one, which encoders cut into patches.
        """
        sizes = self._sizes.get(_kind(tensor))
        return sizes is not None and all(
            _takes(seen, size, counted=dimension == counted, picture=picture)
            for dimension, (seen, size) in enumerate(zip(sizes, tensor.shape, strict=True))
        )


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.dtype, tensor.ndim


def _sort(dtype: torch.dtype) -> type:
    if dtype.is_complex or dtype == torch.bool:
        return complex if dtype.is_complex else bool
    return float if dtype.is_floating_point else int


def _takes(seen: set[int], size: int, *, counted: bool, picture: bool) -> bool:
    if size in seen:
        return True
    if size == 0 or (len(seen) == 1 and not counted):
        return False
    if counted or not picture:
        return True
    most = max(seen)
    return size % math.gcd(*seen) == 0 and (size <= most or most >= _LARGEST)


_LEARNED: Final[WeakKeyDictionary[Processor, dict[str, Mapping[str, _Tensors]]]] = (
    WeakKeyDictionary()
)
"""Of each processor, by modality. Nothing in it holds the processor, which goes with its model."""


def check_tensors(
    processor: Processor, modality: str, items: Sequence[MultiModalKwargsItem]
) -> None:
    """Refuse what no encoder takes. In the processor's one thread; the first for a modality
    processes examples.

    Args:
        items: made with options, in the order in which they were.

    Raises:
        RequestRejectedError: says which tensor is another than it should be.
    """
    known = _LEARNED.setdefault(processor, {})
    learned = known.get(modality)
    if learned is None:
        learned = known[modality] = _learn(processor, modality)
    for item in items:
        if learned.keys() - item.keys() and not item.keys() - learned.keys():
            # With other names as well it is another kind of item: embeddings of the client's.
            missing = ", ".join(sorted(learned.keys() - item.keys()))
            raise RequestRejectedError(f"mm_processor_kwargs: without {missing}")
        own = are_embeds(modality, item)
        for name, element in item.items():
            if name in learned and own:
                _check_told(name, element, learned[name])
            elif name in learned:
                _check(name, element, learned[name], picture=modality == "image")
    if not any(are_embeds(modality, item) for item in items):  # those are counted later
        _check_slices(items)


def _learn(processor: Processor, modality: str) -> Mapping[str, _Tensors]:
    made = [_processed(processor, modality, each) for each in _examples(processor, modality)]
    learned: dict[str, _Tensors] = {}
    for name in set[str].intersection(*map(set, made)) if made else ():
        for tensor in (each for item in made for each in _tensors(item[name].data)):
            learned.setdefault(name, _Tensors()).learn(tensor)
    return learned


def _examples(processor: Processor, modality: str) -> Iterator[ProcessorInputs]:
    if modality == "image":
        for size in _SIZES:
            yield _shown(processor, modality, Image.new("RGB", size))
    elif modality == "video":
        counts = dict.fromkeys(processor.info.supported_mm_limits, 0) | {modality: 1}
        for frames, (width, height) in zip(cycle(_FRAMES), _SIZES, strict=False):
            film = VideoDummyOptions(num_frames=frames, width=width, height=height)
            sizes = MultiModalDummyOptions({modality: film})
            # Films come with descriptions, which vLLM knows to make up for each model.
            yield processor.get_dummy_inputs(_SEQ_LEN, counts, sizes)
    elif modality == "audio":
        for length in _SOUNDS:
            yield _shown(processor, modality, (np.zeros(length, dtype=np.float32), _RATE))


def _shown(processor: Processor, modality: str, medium: object) -> ProcessorInputs:
    return ProcessorInputs([], processor.info.parse_mm_data({modality: [medium]}))


def _processed(
    processor: Processor, modality: str, inputs: ProcessorInputs
) -> MultiModalKwargsItem:
    result = processor._apply_hf_processor(inputs, TimingContext(enabled=False))
    return result.kwargs.require_data()[modality][0]


def _check(name: str, element: MultiModalFieldElem, tensors: _Tensors, *, picture: bool) -> None:
    field = element.field
    counted = field.dim if isinstance(field, MultiModalFlatField) else None
    found = list(_tensors(element.data))
    if not found:
        raise RequestRejectedError(f"mm_processor_kwargs: {name} would be no tensor")
    for tensor in found:
        if not tensors.takes(tensor, counted, picture=picture):
            shape = "x".join(map(str, tensor.shape)) or "one number"
            raise RequestRejectedError(
                f"mm_processor_kwargs: {name} would be {shape} of {tensor.dtype}, which this model "
                "does not take"
            )


def _check_told(name: str, element: MultiModalFieldElem, tensors: _Tensors) -> None:
    """Refuse what a client says of its embeddings, if a processor would never say it."""
    for tensor in _tensors(element.data):
        if not tensors.is_like(tensor):
            raise RequestRejectedError(f"{name} must be {tensors.looks}")
        if not tensors.counts_so(tensor):
            raise RequestRejectedError(
                f"{name}: {tensor.tolist()} is nothing that this model's processor would count"
            )


def _check_slices(items: Sequence[MultiModalKwargsItem]) -> None:
    """Refuse items of which vLLM says that there is more than the processor made."""
    at: dict[tuple[str, int], int] = {}
    for item in items:
        for name, element in item.items():
            field = element.field
            if not isinstance(field, MultiModalFlatField):
                continue
            place = (name, id(field))  # the items of one batch share it
            index = at[place] = at.get(place, -1) + 1
            said, made = _length(field, index), _made(element.data, field.dim)
            if None not in (said, made) and said != made:
                raise RequestRejectedError(
                    f"mm_processor_kwargs: {name} would be {made} long, and this model looks for "
                    f"{said}"
                )


def _length(field: MultiModalFlatField, index: int) -> int | None:
    if index >= len(field.slices):
        return None
    part = field.slices[index]
    own = part if isinstance(part, slice) else part[field.dim]
    ends = own.start, own.stop  # numbers, or tensors that are one, as processors count
    if any(end is None or (isinstance(end, torch.Tensor) and end.numel() != 1) for end in ends):
        return None
    return int(own.stop) - int(own.start)


def _made(data: NestedTensors, dimension: int) -> int | None:
    if isinstance(data, torch.Tensor):
        return data.shape[dimension]
    return len(data) if isinstance(data, list | tuple) else None


def _tensors(data: NestedTensors) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for each in data:
            yield from _tensors(each)
