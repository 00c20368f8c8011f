"""What every run needs, and no reader must open to understand an algorithm.

Each folder is a room with a topic. The harness imports no particular task and no experiment.
"""
