"""What a run writes while it goes on: metrics, samples, statistics, findings, the summary.

All numbers come from the training loop; nothing here knows a formula.
"""
