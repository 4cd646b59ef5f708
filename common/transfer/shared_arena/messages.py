"""Messages between a frontend's processes and their arena's keeper. Notes are opaque to it."""

from typing import TypeAlias

import msgspec

from common.identity import MmHash


class LeaseItem(msgspec.Struct, frozen=True, tag="lease"):
    """Lease an item. Answered with :class:`Granted` or :class:`Nothing`."""

    number: int
    mm_hash: MmHash


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Reserve room for an item. Answered with :class:`Room`, :class:`Granted` if it is there, or
    :class:`Refused`, once no other process writes the item."""

    number: int
    mm_hash: MmHash
    envelope_size: int
    buffer_sizes: tuple[int, ...]


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """The item is written, header included; its token is a lease from now on. Not answered."""

    token: int
    note: bytes


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """Free a reserved segment. Not answered."""

    token: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End leases. Not answered."""

    tokens: list[int]


class Annotate(msgspec.Struct, frozen=True, tag="annotate"):
    """Add a note to an item without one. Not answered."""

    token: int
    note: bytes


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Forget all notes, hashes and names. Not answered."""


class GaveBack(msgspec.Struct, frozen=True, tag="gave_back"):
    """All unused leases were released before this."""


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Claim a medium by its key. Answered, once no other process works on it, with :class:`Granted`
    if it is kept, or :class:`Claimed`."""

    number: int
    key: bytes


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """End a claim, with the item's hash or None. Not answered."""

    key: bytes
    mm_hash: MmHash | None


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """Name an item, in a space of at most ``most`` names. Answered with :class:`Nothing`."""

    number: int
    space: bytes
    name: bytes
    mm_hash: MmHash
    most: int


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Ask for the item of a name. Answered with :class:`Recalled`."""

    number: int
    space: bytes
    name: bytes


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A lease, named by a token in this connection; the note may be empty."""

    number: int
    token: int
    mm_hash: MmHash
    offset: int
    generation: int
    envelope_size: int
    buffer_sizes: tuple[int, ...]
    note: bytes


class Room(msgspec.Struct, frozen=True, tag="room"):
    """A reserved segment."""

    number: int
    token: int
    offset: int
    generation: int


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """The asker must process the medium and send :class:`Landed`."""

    number: int
    key: bytes


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """No result, or done."""

    number: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is no room, for a reason."""

    number: int
    reason: str


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """The item of a name, None if unknown."""

    number: int
    mm_hash: MmHash | None


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """Release all unused leases, for room. Answered with :class:`GaveBack`."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Another process sent :class:`Clear`."""


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
Answer: TypeAlias = Granted | Room | Claimed | Nothing | Refused | Recalled
FromKeeper: TypeAlias = Answer | GiveBack | Forget
