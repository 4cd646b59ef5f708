"""Streams of answers: their events, errors and keep-alive."""
