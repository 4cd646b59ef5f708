"""``make bench-serving``: races between ways to serve a model, over engines whose GPU is the clock.

    options     what is raced, by whom, how often
    contenders  who races, and what each needs
    engines     what all of them have
    start       starts them: stacks ours and vLLM's, foreign_stacks others'
    running     a contender that is up
    group       contenders that are up at the same time
    traffic     what is asked; photos: about which pictures
    play        asks it
    race        blocks in turns; answers: whether all say the same
    usage       CPU time and memory by role; counters: what servers count by themselves
    figures     what a block showed; bound: the least that it could take
    verdict     which rounds count, and what contenders are to each other
    report      how it is told; headline: the last line
    charts      draws it, by itself
    dataset     the same traffic for vLLM's own benchmark

tests/benchmarks/README.md says what the figures mean; ``python -m tests.benchmarks.serving -h``.
"""
