"""One vLLM engine: configuration, requests, outputs, media, adapters, operations and statistics."""
