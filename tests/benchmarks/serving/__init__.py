"""``make bench-serving``: races between ways to serve a model, over engines whose GPU is the clock.

    contenders  who races, and what each needs
    stacks      starts their processes
    traffic     what is asked
    play        asks it
    race        blocks in turns
    figures     what a block showed
    verdict     which rounds count, and what contenders are to each other
    report      how it is told

docs/benchmarks.md says what the figures mean. ``python -m tests.benchmarks.serving --help``.
"""
