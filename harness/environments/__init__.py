"""Environments with a state, each a class in a file, played in this process or, if a user wrote it, in others."""
