"""Every model family that a tiny random model can be made of, held against a plain vLLM.

``python -m tests.families --help``; ``make families`` runs all of it, for hours. What came out is
docs/families.md.
"""
