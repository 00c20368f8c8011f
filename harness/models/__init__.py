"""Models: reading, adapting, checking, saving, and an estimate of the memory that a run needs."""
