"""A run: its start, its directory, its checkpoints, and how it is stopped and resumed.

A run loses nothing that a checkpoint holds.
"""
