"""Index of the blocks that each worker holds, as far as known."""

from frontend.router.index.indexes import (
    EXACT,
    BlockIndexes,
    IndexState,
    Knowledge,
    TargetBlocks,
    approximate,
    degraded,
)
from frontend.router.index.predictions import APPROXIMATE_TTL_S, PREDICT_TTL_S
