"""Search in documents: by words (SQLite), by meaning (vectors), or on a server.

opening.py makes or opens what the flags name.
"""
