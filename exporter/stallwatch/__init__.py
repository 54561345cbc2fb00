"""stallwatch: finds silent stalls of LLM inference servers."""

__version__ = "0.1.0"
