"""What a policy learns from: a task with its rows and rewards, pairs of answers, or conversations.

Read task.py first, then task_file.py (the user's functions) and scorer.py (the rewards).
"""
