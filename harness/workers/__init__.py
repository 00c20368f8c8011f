"""Processes that call the functions of one file with a time limit: a user's tools and environments, and math-verify."""
