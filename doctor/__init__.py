"""The loss doctor: numeric tests for the loss function, masks and advantages of anybody's own trainer.

    python -m doctor my_loss.py

docs/doctor.md explains it, docs/traps.md the mistakes that it looks for.
"""
