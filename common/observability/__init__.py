"""Metrics, spans, log lines, and watchdogs of the event loop and of threads."""
