"""Everything that a run needs and that a reader can skip to understand an algorithm.

Each folder has one topic. The harness imports no particular task and no experiment.
"""
