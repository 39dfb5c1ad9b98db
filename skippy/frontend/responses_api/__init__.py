"""OpenAI's Responses API: ``/v1/responses``."""

from .routes import add_responses_routes

__all__ = ["add_responses_routes"]
