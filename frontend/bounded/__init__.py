"""Child processes that compile clients' grammars and render their templates, within limits.

Nothing is imported here: what a process needs is all that it imports.
"""
