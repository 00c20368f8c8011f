"""A world in which an estimator of the policy gradient can be compared with the exact gradient."""
