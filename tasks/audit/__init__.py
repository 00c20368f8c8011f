"""A program that finds problems in a data set before anyone trains on it, see `__main__.py`."""
