"""What a policy can do on a set of questions, with error bars: the program is evaluate.py, the page docs/evaluate.md.

Read in this order: questions.py (what is asked), answers.py (how it is asked, and kept so that a kill loses nothing),
intervals.py (means with their 95 % intervals), votes.py (majority votes), figures.py (all figures), comparison.py,
table.py and failures.py (what is printed and written), suite.py (several benchmarks).
"""
