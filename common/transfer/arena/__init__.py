"""The frontend's shared memory: allocation, leases and layout.

Without vLLM, so that the media processes import it quickly.
"""

from common.transfer.arena.access import (
    ArenaAccess,
    ArenaStatistics,
    Lease,
    ReservedSegment,
    Segment,
)
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import SHARED_MEMORY, ArenaMapping, open_to_map, reap_orphans
from common.transfer.arena.layout import (
    HEAD_SIZE,
    HEADER_SIZE,
    SEGMENT_ALIGNMENT,
    SEGMENTS_START,
    ArenaOffer,
    Buffer,
    EncodedItem,
    SegmentLayout,
    aligned,
    check_envelope,
    check_head,
    check_header,
    copy_bytes,
    write_parts,
)
from common.transfer.arena.segment_table import SegmentTable
