"""Staged LLM inference: a model cut into layer ranges, a process per range, one OpenAI endpoint in front."""

__version__ = "0.1.0"
