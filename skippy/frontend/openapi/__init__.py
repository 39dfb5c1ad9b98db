"""Our own OpenAPI document: routes, and what they take and give."""

from .document import add_openapi_route, openapi_document
from .routes import ROUTES, Route

__all__ = ["ROUTES", "Route", "add_openapi_route", "openapi_document"]
