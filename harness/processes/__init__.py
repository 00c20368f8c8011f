"""Several processes: how they meet, and what Accelerate makes of them."""
