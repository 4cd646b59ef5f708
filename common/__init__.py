"""What the frontend and the workers share.

Cards, messages and sockets, discovery, transfer of tensors, command lines, metrics, tasks, and what
depends on vLLM's version. Nothing here knows how a request is routed or how an engine runs.
"""
