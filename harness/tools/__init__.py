"""Tools of a user, read from a file and called in processes of their own, as are the verdicts of mathematics."""
