"""Code shared by the frontend and the workers.

Cards, messages and sockets, discovery, tensor transfer, command lines, metrics, tasks, and what
depends on vLLM's version. Knows neither routing nor the running of an engine.
"""
