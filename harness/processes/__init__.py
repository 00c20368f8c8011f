"""Several processes: how they connect, and how Accelerate uses them."""
