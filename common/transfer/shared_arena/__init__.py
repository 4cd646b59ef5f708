"""One arena for all processes of a frontend: one of them keeps it, the others use it.

Without vLLM, so that the process that keeps it starts at once.
"""

from common.transfer.shared_arena.client import SharedArena
from common.transfer.shared_arena.directory import MediaDirectory
from common.transfer.shared_arena.keeper import QUARANTINE_S, ArenaKeeper
from common.transfer.shared_arena.names import MediaNames, key_name

__all__ = ["QUARANTINE_S", "ArenaKeeper", "MediaDirectory", "MediaNames", "SharedArena", "key_name"]
