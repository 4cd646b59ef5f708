"""Processes that do what clients ask for and nobody knows the cost of, within limits.

Nothing is imported here: what a process needs is all that it imports.
"""
