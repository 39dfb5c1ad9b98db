"""Configuration of links: schemes, TLS files, conditions of the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skippy.config import (
    ConfigError,
    Endpoint,
    StageOptions,
    WireConditions,
    check_links,
)
from tests.test_config import STAGE, read


@pytest.mark.parametrize("scheme", ["tls", "ws", "wss"])
def test_schemes(scheme: str) -> None:
    endpoint = Endpoint.parse(f"{scheme}://[::1]:80")
    assert endpoint == Endpoint("::1", 80, scheme)
    assert str(endpoint) == endpoint.url == f"{scheme}://[::1]:80"
    assert endpoint.with_scheme("tcp") == Endpoint("::1", 80)


def test_an_unknown_scheme_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="udp://, which is not known .*tcp://, tls://, ws://, wss://"):
        Endpoint.parse("udp://host:80")


TLS = StageOptions(tls_cert="c.pem", tls_key="k.pem", tls_ca="ca.pem")


def test_listening_with_tls_needs_a_certificate() -> None:
    config = read(STAGE | {"bind_addr": "wss://127.0.0.1:0"})
    with pytest.raises(ConfigError, match="tls_cert: is missing, but bind_addr is wss://127.0.0.1:0"):
        check_links(config, None, StageOptions())
    check_links(config, None, TLS)


def test_tls_files_that_no_link_uses_are_refused() -> None:
    with pytest.raises(ConfigError, match="tls_cert: is given, but no endpoint"):
        check_links(read(STAGE), None, TLS)
    peer = STAGE["upstream"] | {"endpoint": "tls://127.0.0.1:1"}
    check_links(read(STAGE | {"upstream": peer}), None, StageOptions(tls_ca="ca.pem"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_key": "k.pem"}, "tls_cert: is missing; tls_key needs it"),
        ({"tls_ca": " "}, "tls_ca: must not be empty"),
        ({"downstream_wire_delay_ms": -1}, "downstream_wire_delay_ms: is -1, must be 0 to 3600000"),
        ({"downstream_wire_jitter_ms": math.inf}, "downstream_wire_jitter_ms: is inf"),
        ({"downstream_wire_stall_ms": math.nan}, "downstream_wire_stall_ms: is nan"),
        ({"downstream_wire_mbps": math.inf}, "downstream_wire_mbps: is inf, must be above 0 and finite"),
        ({"downstream_wire_mbps": 0}, "downstream_wire_mbps: is 0, must be above 0 and finite"),
        ({"downstream_wire_stall_probability": 0.5}, "downstream_wire_stall_probability: a stall needs"),
        ({"downstream_wire_stall_ms": 0.5}, "downstream_wire_stall_probability: a stall needs"),
    ],
)
def test_options_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StageOptions(**settings)
    assert str(caught.value).startswith(text)


def test_wire_conditions_are_none_unless_one_is_asked_for() -> None:
    assert StageOptions().wire_conditions is None
    conditions = StageOptions(downstream_wire_delay_ms=5, downstream_wire_mbps=10).wire_conditions
    assert conditions == WireConditions(delay_ms=5, mbps=10)
