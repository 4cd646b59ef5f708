"""KV events of the engine: published, logged, replayed, and one snapshot of all blocks it holds."""
