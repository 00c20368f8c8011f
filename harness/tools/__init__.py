"""Tools of a user: read from a file, and called in processes of their own.

One mechanism serves the verdicts of mathematics, too.
"""
