"""Random bodies, by our own OpenAPI document, against a chain: nothing breaks, and nothing is lost."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from typing import Any

import httpx
import jsonschema
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from skippy import embed
from skippy.config import OpenAIOptions
from skippy.frontend.openapi import ROUTES, Route, openapi_document
from skippy.frontend.responses import dump
from tests.support.cluster import toy_cluster

BODIES = 500
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 3}
"""What bodies ask for is cut to this, so that answers stay short."""
SCHEMAS: dict[str, Any] = openapi_document()["components"]["schemas"]
POSTS = [route for route in ROUTES if route.request is not None and route.path.startswith("/v1/")]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def closed(schema: Any) -> Any:
    """The schema with what it refers to in it."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return closed(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    return {key: closed(value) for key, value in schema.items()}


def served(route: Route, model: str) -> Any:
    schema = copy.deepcopy(closed({"$ref": f"#/{route.request}"}))
    for one in schema.get("anyOf", [schema]):
        if "model" in one["properties"]:
            one["properties"]["model"] = {"const": model}
    return schema


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Values that fit a schema of our document."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema:
        return st.one_of(*map(fitting, schema["anyOf"]))
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high) | st.integers(low, min(high or 99, (low or 0) + 9))
        case "number":
            return st.floats(low, high) | st.integers(math.ceil(low), math.floor(high))
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
        case "array" if "prefixItems" in schema:
            return st.tuples(*map(fitting, schema["prefixItems"])).map(list)
        case "array":
            least = schema.get("minItems", 0)
            most = min(schema.get("maxItems", least + 2), least + 2)
            return st.lists(fitting(schema.get("items", {})), min_size=least, max_size=most)
        case "object":
            return fitting_objects(schema)
    return ANYTHING


def fitting_objects(schema: Any) -> st.SearchStrategy[Any]:
    members = {name: fitting(inner) for name, inner in schema.get("properties", {}).items()}
    required = {name: members.pop(name) for name in schema.get("required", ())}
    # A few of the many optional ones, or hardly any combination could be carried out.
    chosen = st.lists(st.sampled_from(sorted(members)), max_size=3, unique=True) if members else st.just([])
    named = chosen.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: members[name] for name in names}})
    )
    more = schema.get("additionalProperties", True)
    if more is False:
        return named
    free = ANYTHING if more is True else fitting(more)
    return st.builds(
        lambda one, two: {**two, **one}, named, st.dictionaries(st.text(max_size=5), free, max_size=2)
    )


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every member of every object and array in ``value``, as the container and the key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


@st.composite
def spoilt(draw: st.DrawFn, valid: st.SearchStrategy[Any]) -> Any:
    """A valid body with a member replaced, dropped or added somewhere."""
    body = copy.deepcopy(draw(valid))
    found = places(body)
    if not found:
        return draw(ANYTHING)
    container, key = found[draw(st.integers(0, len(found) - 1))]
    how = draw(st.sampled_from(["replace", "drop", "add"]))
    if how == "replace":
        container[key] = draw(ANYTHING)
    elif how == "drop":
        del container[key]
    elif isinstance(container, dict):
        container[draw(st.text(max_size=12))] = draw(ANYTHING)
    else:
        container.append(draw(ANYTHING))
    return body


def draw_bodies(model: str) -> list[tuple[Route, Any]]:
    drawn: list[tuple[Route, Any]] = []
    for route in POSTS:
        valid = fitting(served(route, model))
        bodies = st.one_of(valid, valid, spoilt(valid), spoilt(valid), ANYTHING)
        drawn += [(route, body) for body in draw_some(bodies)]
    random.Random(7).shuffle(drawn)
    return drawn


def draw_some(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """Values, to be used later: a chain for each of them would take minutes."""
    drawn: list[Any] = []

    @settings(
        max_examples=-(-BODIES // len(POSTS)),
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


def shortened(body: Any) -> Any:
    if isinstance(body, dict):
        for name, limit in LIMITS.items():
            # -1 is the rest of the context.
            if isinstance(body.get(name), int) and (body[name] > limit or body[name] == -1):
                body[name] = limit
    return body


@pytest.mark.slow
async def test_no_500_no_hang_no_lane_lost() -> None:
    lanes = 3
    with trio.fail_after(300):
        async with (
            toy_cluster(2, lane_count=lanes, ctx_size=2048) as cluster,
            embed.open_openai(
                cluster.first, OpenAIOptions(bind_addr="127.0.0.1:0", default_max_tokens=3)
            ) as endpoint,
            httpx.AsyncClient(base_url=endpoint.url.removesuffix("/v1"), timeout=60) as http,
        ):
            await endpoint.wait_ready()
            waiting = draw_bodies(cluster.first.config.model_id)
            statuses: Counter[int] = Counter()

            async def send() -> None:
                while waiting:
                    route, body = waiting.pop()
                    data = dump_anything(shortened(body))
                    headers = {"content-type": "application/json"}
                    answer = await http.post(route.path, content=data, headers=headers)
                    statuses[answer.status_code] += 1
                    check(route, data, answer)

            async with trio.open_nursery() as nursery:
                for _ in range(2 * lanes):
                    nursery.start_soon(send)
            assert sum(statuses.values()) >= BODIES
            assert statuses[200] > BODIES / 10, statuses
            assert statuses[400] > BODIES / 10, statuses
            while cluster.first.lane_states() != {"idle": lanes}:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert cluster.free_sequences == [stage.info.max_sequences for stage in cluster.stages]


def dump_anything(body: Any) -> bytes:
    """Also text that is no Unicode."""
    try:
        return dump(body)
    except UnicodeEncodeError:
        return dump(body if not isinstance(body, dict) else {str(key)[:1]: None for key in body})


def check(route: Route, data: bytes, answer: httpx.Response) -> None:
    shown = (route.path, data, answer.status_code, answer.text[:2000])
    assert answer.status_code in (200, 400, 404), shown
    if answer.status_code != 200:
        name = "AnthropicError" if route.path.startswith("/v1/messages") else "Error"
        jsonschema.validate(answer.json(), closed(SCHEMAS[name]))
        assert answer.json()["error"]["message"], shown
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("\n\n"), shown
        assert '"error":{' not in answer.text, shown
    elif route.answer is not None:
        jsonschema.validate(answer.json(), closed(SCHEMAS[route.answer]))
