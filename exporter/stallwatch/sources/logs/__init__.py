"""The servers' logs: where they are, what is new in them, and what a line says.

A line goes from `places` and `streams` (which file or journal belongs to which server) through `guard` and `tail` (the
bytes, read so that a dead mount holds nobody) and `decode` (containers' wrappings) to `lines`, which finds what the
framework's file names; `collector` is the source.
"""
