"""Anthropic's Messages API: ``/v1/messages``."""

from .routes import ANTHROPIC_PREFIX, add_anthropic_routes
from .shape import error_envelope

__all__ = ["ANTHROPIC_PREFIX", "add_anthropic_routes", "error_envelope"]
