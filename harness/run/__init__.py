"""A run: its start, its directory, its checkpoints, and how it is stopped and resumed."""
