"""Two real processes over each link backend: the completion is the one that the chain over TCP gives."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Certificates
from tests.support.processes import running

from .test_processes import ask, two_machines


def put_scheme(path: Path, scheme: str) -> None:
    """Let every endpoint of a configuration file begin with ``scheme``."""
    content = json.loads(path.read_text())

    def visit(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                if key in ("bind_addr", "endpoint"):
                    value[key] = f"{scheme}://{item}"
                visit(item)

    visit(content)
    path.write_text(json.dumps(content))


def complete(folder: Path, model: Path, scheme: str, *arguments: str) -> str:
    """Serve the bundled model with two processes and take one completion."""
    commands = two_machines(folder, model, ["127.0.0.1", "127.0.0.2"])
    for path in folder.glob("*.json"):
        put_scheme(path, scheme)
    with contextlib.ExitStack() as stack:
        last, first = (
            stack.enter_context(running(["serve-binary", *command[1:], *arguments]))
            for command in reversed(commands)
        )
        last.wait_for(f"listens on {scheme}://" if scheme != "tcp" else "listens on 127")
        url = first.wait_for(r"(http://\S+/v1)")[1]
        first.wait_for("ready")
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def over_tcp(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> str:
    return complete(tmp_path_factory.mktemp("tcp"), bundled_model, "tcp")


@pytest.mark.parametrize(
    ("scheme", "arguments"),
    [
        ("tls", []),
        ("ws", []),
        ("wss", []),
        ("tcp", ["--downstream-wire-delay-ms", "5", "--downstream-wire-mbps", "100"]),
    ],
)
def test_the_completion_is_that_of_the_chain_over_tcp(
    tmp_path: Path,
    bundled_model: Path,
    certificates: Certificates,
    over_tcp: str,
    scheme: str,
    arguments: list[str],
) -> None:
    if scheme in ("tls", "wss"):
        files = certificates.files()
        arguments = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]
    assert complete(tmp_path, bundled_model, scheme, *arguments) == over_tcp
