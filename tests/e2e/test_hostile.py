"""Hostile peers at every stage of a real chain, which serves on: same answers, same lanes, nothing left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import psutil
import pytest
import trio

from skippy.protocol import AdmissionRequest, ConnectionRole
from skippy.stage.accepting import SPARE_CONNECTIONS
from tests.support.attacks import run_attacks
from tests.support.hostile import Ended, Target, besieged

from .support import LAYERS, ServedChain, serve_chain, write_chain

TOKEN = "the token of the chain"
LANES = 6
CONTEXT = 512
BATCH = 128
WIDTH = 576
STAGES = 3


@attrs.frozen
class Resources:
    """What a stage process holds: descriptors, and the ends of its links to other stages."""

    descriptors: int
    links: frozenset[Any]

    @classmethod
    def of(cls, pid: int, ports: set[int]) -> Resources:
        process = psutil.Process(pid)
        links = frozenset(
            (c.laddr, c.raddr)
            for c in process.net_connections("tcp")
            if c.raddr and {c.laddr.port, c.raddr.port} & ports
        )
        return cls(process.num_fds(), links)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Iterator[ServedChain]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "token").write_text(TOKEN)
    commands = write_chain(
        folder, bundled_model, ["127.0.0.1"] * STAGES, ctx_size=CONTEXT, lane_count=LANES, n_batch=BATCH
    )
    with pytest.MonkeyPatch.context() as patch:
        # Elsewhere the last bits of an answer depend on what else is computed in the same batch.
        patch.setenv("SKIPPY_ITERATION_SCHEDULER_SAFE_MODE", "1")
        with serve_chain(commands, "--link-token-file", str(folder / "token")) as served:
            yield served


@pytest.fixture(scope="module")
def targets(chain: ServedChain) -> list[Target]:
    """The stages, as somebody sees them who has their configuration files."""
    result = []
    for index, stage in enumerate(chain.stages):
        host, port = stage.wait_for(r"listens on (\S+):(\d+) with").groups()
        request = AdmissionRequest(
            role=ConnectionRole.LANE,
            sender_id="stranger",
            sender_index=index - 1,
            target_id=None,
            target_index=index,
            layer_start=LAYERS * index // STAGES,
            layer_end=None,
            run_id="test",
            topology_id="chain",
            model_id="smollm2",
            layer_count=None,
            package_id=None,
            activation_width=WIDTH if index else 0,
            cache_type_k=None,
            cache_type_v=None,
            context_length=CONTEXT,
            batch_rows=1,
        )
        result.append(Target(host, int(port), TOKEN.encode(), request, BATCH))
    return result


class GoodClient:
    """Asks the same of the chain again and again."""

    def __init__(self, chain: ServedChain, http: httpx.AsyncClient) -> None:
        self._chain = chain
        self._http = http
        self.answers: list[str] = []

    async def ask(self) -> str:
        body = {"model": self._chain.model, "prompt": "The sky is", "max_tokens": 12, "temperature": 0}
        response = await self._http.post(self._chain.url + "/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def ask_on(self) -> None:
        while True:
            self.answers.append(await self.ask())

    async def ask_on_all_lanes(self) -> list[str]:
        answers: list[str] = []

        async def ask() -> None:
            answers.append(await self.ask())

        async with trio.open_nursery() as nursery:
            for _ in range(LANES):
                nursery.start_soon(ask)
        return answers


async def test_every_stage_serves_on_under_attack(chain: ServedChain, targets: list[Target]) -> None:
    ports = {target.port for target in targets}

    def resources() -> list[Resources]:
        return [Resources.of(stage.popen.pid, ports) for stage in chain.stages]

    with trio.fail_after(240):
        async with httpx.AsyncClient(timeout=60, headers={"Connection": "close"}) as http:
            client = GoodClient(chain, http)
            (right,) = set(await client.ask_on_all_lanes())
            before = resources()
            ended: list[list[Ended]] = []
            for target in targets:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.ask_on)
                    async with besieged(target, strangers=SPARE_CONNECTIONS + LANES + 40):
                        ended.append(await run_attacks(target))
                        assert await client.ask() == right
                    nursery.cancel_scope.cancel()
                assert client.answers.count(right) == len(client.answers) > 3
                assert await client.ask_on_all_lanes() == [right] * LANES
            # Each answer takes the chain's own time, so this does not spin.
            while (now := resources()) != before:
                assert trio.current_effective_deadline() - trio.current_time() > 60, (before, now)
                assert await client.ask() == right
    for stage, ends in zip(chain.stages, ended, strict=True):
        assert stage.popen.poll() is None
        assert_reported(stage.errors, ends)


def assert_reported(lines: list[str], ends: list[Ended]) -> None:
    """Each attack was reported once, with its reason, and none as a fault of the stage."""
    events = [json.loads(line) for line in lines]
    # A stranger may have come from the port of an attack that was over, so an address can have several.
    reasons: dict[str, list[str]] = {}
    for event in events:
        if "peer_addr" in event and "error" in event:
            reasons.setdefault(event["peer_addr"], []).append(event["error"])
    wrong = [
        (end.name, reasons.get(end.address))
        for end in ends
        if not any(re.search(end.reason, reason) for reason in reasons.get(end.address, []))
    ]
    assert not wrong
    assert not [event for event in events if "fault of this program" in event["event"]]
