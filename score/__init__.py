"""The published score: recordings against their truth table, and the obvious rules on the same recordings.

`make score` writes docs/SCORE.md.  Every number in it comes from a run; tests/test_score.py runs it again.
"""
