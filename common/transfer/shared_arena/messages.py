"""What the processes of a frontend and the one that keeps their arena say to each other.

Notes are bytes to the keeper: who wrote one and who reads it know what it is.
"""

from typing import TypeAlias

import msgspec

from common.identity import MmHash


class LeaseItem(msgspec.Struct, frozen=True, tag="lease"):
    """Lease an item. Answered with :class:`Granted` or :class:`Nothing`."""

    number: int
    mm_hash: MmHash


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Room for an item: :class:`Room`, :class:`Granted` if it is there, :class:`Refused`.

    Answered once nobody else is writing the item.
    """

    number: int
    mm_hash: MmHash
    envelope_size: int
    buffer_sizes: tuple[int, ...]


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """The item is written, header and all; its token is a lease from now on. Not answered."""

    token: int
    note: bytes


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """It won't be written. Not answered."""

    token: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Leases end. Not answered."""

    tokens: list[int]


class Annotate(msgspec.Struct, frozen=True, tag="annotate"):
    """A note for an item that has none. Not answered."""

    token: int
    note: bytes


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Forget all notes, hashes and names. Not answered."""


class GaveBack(msgspec.Struct, frozen=True, tag="gave_back"):
    """Whatever was leased for later was released before this."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """A medium, by what makes it alike: :class:`Granted` if it is kept; :class:`Nothing` if the
    asker is to process it and to say :class:`Landed`. Answered once nobody else is at it."""

    number: int
    key: bytes


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """A claim ends; a hash says what came of it, None that nothing did. Not answered."""

    key: bytes
    mm_hash: MmHash | None


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """From now on a name stands for an item, in a space of so many at most. Answered with
    :class:`Nothing`."""

    number: int
    space: bytes
    name: bytes
    mm_hash: MmHash
    most: int


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """What a name stands for: :class:`Recalled`."""

    number: int
    space: bytes
    name: bytes


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A lease, named by a token in this connection; the note is empty if there is none."""

    number: int
    token: int
    mm_hash: MmHash
    offset: int
    generation: int
    envelope_size: int
    buffer_sizes: tuple[int, ...]
    note: bytes


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Room for an item that was asked for."""

    number: int
    token: int
    offset: int
    generation: int


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """There is nothing, or nothing to say."""

    number: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is no room, for a reason."""

    number: int
    reason: str


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """What a name stands for, None if nothing."""

    number: int
    mm_hash: MmHash | None


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """Somebody needs room: release what is leased for later. Answered with :class:`GaveBack`."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Somebody sent :class:`Clear`."""


ToKeeper: TypeAlias = (
    LeaseItem
    | Reserve
    | Complete
    | GiveUp
    | Release
    | Annotate
    | Clear
    | GaveBack
    | Claim
    | Landed
    | Remember
    | Recall
)
Answer: TypeAlias = Granted | Room | Nothing | Refused | Recalled
FromKeeper: TypeAlias = Answer | GiveBack | Forget
