"""Recordings of stuck, slow and healthy servers, written by a script: see docs/RECORDINGS.md.

stage.py    a node, its servers and processes, a clock; writes the lines of a recording
pieces.py   what servers do: load, compile, wait at a barrier, serve, stand still
startup.py serving.py traps.py edges.py   the stories, from those pieces
corpus.py   case -> how to make it
truth.yaml  case -> what a verdict must say, and by when
truth.py twins.py played.py   the table read, twins compared, a case replayed
kept.py     a case replayed once for all workers of a test run
"""
