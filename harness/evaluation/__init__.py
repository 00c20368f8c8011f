"""How well a policy answers a set of questions, with error bars: the program is evaluate.py, the page docs/evaluate.md.

Read session.py first (the questions and the directory), then completions.py and figures.py.
"""
