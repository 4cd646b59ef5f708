"""An adapter of a worker, as the request plane has it."""

from typing import Annotated

import msgspec

from common.request_plane.card import LONGEST_NAME


class HeldAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that a worker has; fields are those of a card's ``Adapter``."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    base_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)] | None = (
        None
    )
    is_3d_lora_weight: bool = False

    @property
    def legible(self) -> bool:
        """Whether all of it can stand in a log line."""
        return all(map(str.isprintable, (self.name, self.path, self.base_model_name or "")))
