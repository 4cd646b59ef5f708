"""KV events: published, logged, replayed and summed up."""
