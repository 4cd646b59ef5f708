"""Publish, log and replay KV events, and make snapshots of all blocks that the engine holds."""
