"""The teachers of imitation/distill: a model on this machine, or on a server."""
