"""The OpenAI endpoint as a Quart application on Trio.

:mod:`skippy.frontend.openapi.routes` lists its routes. Every error, of whatever status, has OpenAI's
envelope, but for those about Anthropic's routes, which have theirs.
"""

from __future__ import annotations

from typing import Any

from quart import Response, has_request_context, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from .access import AccessPolicy
from .anthropic import ANTHROPIC_PREFIX, add_anthropic_routes, error_envelope
from .cache_view import parse_namespace
from .connection import OwningConnection, credentials, request_id
from .embeddings import add_embeddings_route
from .errors import ApiError, from_generation_error, internal_error
from .generation import GenerationError, Generator
from .guard import guard
from .inside import add_inside_routes
from .live import LiveFeed, add_live_route
from .models import add_model_routes
from .openapi import add_openapi_route
from .options import FrontendOptions
from .responses_api import add_responses_routes
from .routing import Bodies, caller_of_request, json_answer
from .schemas import parse_chat, parse_completion
from .service import CompletionService
from .template_route import add_template_route
from .tokenizing import add_tokenizer_routes
from .web_page import add_web_page

_EXTENSION = "skippy"
_FEED = "skippy.feed"


def create_app(generator: Generator, options: FrontendOptions | None = None) -> QuartTrio:
    """The application; serve it with :func:`skippy.frontend.server.serve_http` or any ASGI server on Trio.

    Its start-up begins the template renderer in ``app.nursery``; the worker process itself starts with the
    first chat request and ends with that nursery.
    """
    options = options or FrontendOptions()
    service = CompletionService(generator, options)
    app = QuartTrio(__name__, static_folder=None)
    app.asgi_http_class = OwningConnection
    # Quart's own deadlines and limits end streams silently or answer in HTML: ours replace them.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = None
    app.config["MAX_CONTENT_LENGTH"] = None
    app.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = None
    app.url_map.merge_slashes = False
    app.extensions[_EXTENSION] = service
    app.extensions[_FEED] = feed = LiveFeed(generator.status, refresh=generator.time_stages)

    @app.before_serving
    async def start_renderer() -> None:
        await app.nursery.start(service.renderer.run)
        app.nursery.start_soon(feed.run)

    policy = AccessPolicy(options.access, options.host_names)
    guard(app, policy, service.metrics)
    _add_errors(app)
    _add_status_routes(app, service, policy)
    bodies = Bodies(options)
    _add_completion_routes(app, service, bodies)
    _add_cache_routes(app, generator)
    add_model_routes(app, service, generator)
    add_openapi_route(app)
    add_responses_routes(app, service, options, bodies)
    add_anthropic_routes(app, service, bodies)
    add_embeddings_route(app, generator, bodies)
    add_template_route(app, service, bodies)
    add_tokenizer_routes(app, generator.tokenizer, generator.model_id, bodies)
    add_inside_routes(app, generator, service.requests, service.metrics)
    add_live_route(app, feed, policy)
    add_web_page(app)
    return app


def refuse_generations(app: QuartTrio) -> None:
    """Shutdown: refuse new generations with 503 from now on."""
    service: CompletionService = app.extensions[_EXTENSION]
    service.refuse()
    feed: LiveFeed = app.extensions[_FEED]
    feed.close()


def end_generations(app: QuartTrio) -> None:
    """Shutdown: end every running generation of ``app`` with an error, refuse new ones. Does not wait."""
    service: CompletionService = app.extensions[_EXTENSION]
    service.shut_down()


def _envelope(error: ApiError) -> dict[str, Any]:
    """The body that the route's clients expect of an error."""
    if has_request_context() and request.path.startswith(ANTHROPIC_PREFIX):
        return error_envelope(error, request_id(request))
    return error.envelope()


def _add_errors(app: QuartTrio) -> None:
    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        response = json_answer(_envelope(error), error.status)
        if error.retry_after_secs is not None:
            response.headers["retry-after"] = str(error.retry_after_secs)
        return response

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or 500
        if not has_request_context():  # a WebSocket handshake
            shown = ApiError("there is no WebSocket here", status=status)
        elif isinstance(error, NotFound):
            shown = ApiError(f"there is nothing at {request.method} {request.path[:200]}", status=404)
        elif isinstance(error, MethodNotAllowed):
            methods = ", ".join(sorted(error.valid_methods or ()))
            shown = ApiError(f"{request.path[:200]} takes {methods}, not {request.method}", status=405)
        elif status >= 500:
            shown = internal_error()
        else:
            shown = ApiError(error.description or error.name, status=status)
        response = json_answer(_envelope(shown), status)
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["allow"] = ", ".join(sorted(error.valid_methods))
        return response


def _add_status_routes(app: QuartTrio, service: CompletionService, policy: AccessPolicy) -> None:
    @app.get("/health")
    @app.get("/healthz")
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/readyz")
    async def ready() -> Response:
        if (why := service.unready) is not None:
            # Names hosts of the chain, which are for those with a key.
            raise ApiError(why if policy.has_key(credentials(request)) else "not ready", status=503)
        return json_answer({"status": "ready"})


def _add_completion_routes(app: QuartTrio, service: CompletionService, bodies: Bodies) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await service.chat(await bodies.parsed(parse_chat), caller_of_request())

    @app.post("/v1/completions")
    async def completions() -> Response:
        return await service.completion(await bodies.parsed(parse_completion), caller_of_request())


def _add_cache_routes(app: QuartTrio, generator: Generator) -> None:
    @app.get("/kv")
    async def cache() -> Response:
        return json_answer(await generator.cache_report())

    # No form and no script of another origin can send this without asking first.
    @app.delete("/kv")
    async def drop() -> Response:
        namespace = parse_namespace(request.args.items(multi=True))
        try:
            return json_answer(
                {"object": "kv_cache.dropped", "dropped": await generator.drop_cache(namespace)}
            )
        except GenerationError as error:
            raise from_generation_error(error) from error
