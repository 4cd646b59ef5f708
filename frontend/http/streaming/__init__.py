"""Streams of answers: their events, their errors and their keep-alive."""
