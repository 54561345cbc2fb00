"""Recordings: what the sources read, written down, and judged again."""
