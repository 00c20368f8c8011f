"""How well a policy answers a set of questions, with error bars: the program is evaluate.py, the page docs/evaluate.md.

Read session.py first (which questions, in which directory), then completions.py and figures.py.
"""
