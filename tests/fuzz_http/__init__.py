"""Hostile requests against a real frontend over simulated engines: ``make fuzz-http``."""
