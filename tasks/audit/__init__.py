"""What is wrong with a data set, before anyone trains on it; a program, see `__main__.py`."""
