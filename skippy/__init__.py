"""Staged LLM inference: a model cut into layer ranges, one range per process, one OpenAI endpoint in front."""

__version__ = "0.1.0"
