"""A run: its start, its directory, its checkpoints, and how it stops and resumes."""
