"""Search in documents: by words (SQLite), by meaning (vectors), or on a server. opening.py opens what flags name."""
