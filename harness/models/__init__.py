"""Models: read, adapted, refused where they cannot be trained, and saved.

estimate.py says how much memory a run needs.
"""
