"""What a policy can do on a set of questions, with error bars: the program is evaluate.py, the page docs/evaluate.md.

Read session.py first (what is asked, in which directory), then completions.py and figures.py.
"""
