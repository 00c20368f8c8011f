"""A user's tools, read from a file."""
