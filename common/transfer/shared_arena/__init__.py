"""One arena for all processes of a frontend: one process keeps it, the others use it.

Without vLLM, so that the keeper starts fast.
"""

from common.transfer.shared_arena.client import SharedArena
from common.transfer.shared_arena.keeper import ArenaKeeper
from common.transfer.shared_arena.media_claims import MediaClaims, MediaNames, key_name
