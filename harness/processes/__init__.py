"""Several processes: how they meet, and what Accelerate makes of them.

common/parallel.py is what a train.py says to the others.
"""
