"""Listening sockets of commands."""

from __future__ import annotations

import socket

import pytest

from skippy.cli.errors import CliError
from skippy.cli.sockets import endpoint_of, listen_on, url_host
from skippy.config import Endpoint


class TestSockets:
    def test_a_name_that_does_not_resolve(self) -> None:
        with pytest.raises(CliError, match=r"^the stage cannot listen on no\.such\.host\.invalid:1: "):
            listen_on(Endpoint("no.such.host.invalid", 1), "the stage")

    def test_an_address_of_another_machine(self) -> None:
        with pytest.raises(CliError, match=r"^the stage cannot listen on 192\.0\.2\.1:0: "):
            listen_on(Endpoint("192.0.2.1", 0), "the stage")

    def test_endpoint_is_where_it_listens(self) -> None:
        with listen_on(Endpoint("127.0.0.1", 0), "it") as listener:
            socket.create_connection(listener.getsockname()).close()
            assert endpoint_of(listener) == Endpoint("127.0.0.1", listener.getsockname()[1])

    def test_the_host_for_a_url(self) -> None:
        assert url_host(Endpoint("0.0.0.0", 5)) == Endpoint("127.0.0.1", 5)
        assert url_host(Endpoint("::", 5)) == Endpoint("::1", 5)
        assert url_host(Endpoint("10.0.0.1", 5)) == Endpoint("10.0.0.1", 5)
