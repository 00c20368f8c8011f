"""`--estimate`: whether a run fits into memory and how long a step takes, before anything is trained."""
