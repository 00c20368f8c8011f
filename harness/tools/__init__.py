"""A user's tools, read from a file and called in separate processes, as is the verification of mathematics."""
