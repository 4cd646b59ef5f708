"""Which worker runs a request: hashing, the index of blocks, cost and decision."""
