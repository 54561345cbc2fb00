"""stallwatch: finds silent stalls of LLM inference servers."""

__version__ = "1.0.0rc1"
