"""A network of simulated links: endpoints are names, and every link can fail as it was told."""

from __future__ import annotations

import errno
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import attrs
import trio

from skippy.config import Endpoint
from skippy.protocol import Buffer
from skippy.stage.links import Link, LinkClosed, Listener, Transport

from .clock import SimClock
from .faults import PERFECT, Conditions, Direction, Fault, LinkFault, LinkName
from .pipes import Pipe

BACKLOG = 128


class SimLink(Link):
    """One end of a simulated link."""

    def __init__(self, wire: Wire, peer: str, out: Pipe, into: Pipe) -> None:
        self._wire = wire
        self._peer = peer
        self._out = out
        self.into = into
        self._closed = False
        self._descriptor = wire.network.new_descriptor(self)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def sends_from_any_thread(self) -> bool:
        """As for TCP, so that frames take the same ways; there is one thread."""
        return True

    @property
    def descriptor(self) -> int | None:
        return None if self._closed else self._descriptor

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await trio.lowlevel.checkpoint()
        while rest := self._out.write(buffers):
            await self._out.wait_writable()
            buffers = rest

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        return self._out.write(buffers)

    async def receive_into(self, buffer: memoryview) -> int:
        return await self.into.read(buffer)

    def receive_nowait(self, buffer: memoryview, *, ready: bool = False) -> int | None:
        return self.into.read_nowait(buffer)

    def close(self) -> None:
        """As TCP: what was sent still arrives, unless bytes that nobody read make it a reset."""
        if self._closed:
            return
        self._closed = True
        del self._wire.network.descriptors[self._descriptor]
        silent, unread = self._out.stalled, self.into.unread
        self.into.close_receiver("the link is closed")
        if silent:
            self._out.fail_sender("the link is closed")
        elif unread:
            self._out.reset("the link is closed")
        else:
            self._out.end()
            self._out.fail_sender("the link is closed")
        if not silent:  # else the other side does not hear of it
            self.into.fail_sender("the other end is closed")
        self._wire.closed()


class Wire:
    """Both directions of one link. Made by :meth:`SimNetwork.connect`.

    Attributes:
        name: which link it is.
        pipes: its two directions.
        open_ends: ends that have not been closed.
    """

    def __init__(
        self, network: SimNetwork, name: LinkName, endpoint: Endpoint, conditions: Conditions
    ) -> None:
        self.name = name
        self.open_ends = 2
        self.network = network

        def pipe(direction: Direction) -> Pipe:
            return Pipe(
                f"{name} {direction.value}",
                conditions,
                random.Random(f"{network.seed}/{name}/{direction.value}"),
                [each.fault for each in network.faults if (each.link, each.direction) == (name, direction)],
                clock=network.clock,
                break_link=lambda reset: self._break(direction, reset),
                tell=network.tell,
                struck=lambda kind: network.struck.append((trio.current_time(), kind.value)),
            )

        self.pipes = {direction: pipe(direction) for direction in Direction}
        forward, back = self.pipes[Direction.FORWARD], self.pipes[Direction.BACK]
        self.near = self.make_link(str(endpoint), forward, back)
        self.far = self.make_link(name.dialer, back, forward)

    def make_link(self, peer: str, out: Pipe, into: Pipe) -> SimLink:
        """One of its two ends."""
        return SimLink(self, peer, out, into)

    def strike(self, direction: Direction, fault: Fault) -> None:
        """Let a fault begin now, whatever its frame and byte. Raises ValueError for a lie."""
        self.network.tell(f"{self.name} {direction.value} {fault.kind.value} now")
        self.pipes[direction].strike(fault)

    def reset(self) -> None:
        """Both sides find the link broken; what is under way is lost."""
        for pipe in self.pipes.values():
            pipe.reset("the link was reset")

    def _break(self, direction: Direction, reset: bool) -> None:
        ahead, other = self.pipes[direction], self.pipes[direction.other]
        if reset:
            ahead.reset_behind("the link was reset")
            other.reset("the link was reset")
            return
        ahead.end()
        other.end()
        for pipe in (ahead, other):
            pipe.fail_sender("the other end is closed")

    def closed(self) -> None:
        """One end has been closed."""
        self.open_ends -= 1
        if not self.open_ends:
            self.network.wires.pop(self.name, None)


class SimListener(Listener):
    """Accepts links that somebody on the network dials."""

    def __init__(self, network: SimNetwork, owner: str, endpoint: Endpoint) -> None:
        self.owner = owner
        self._network = network
        self._endpoint = endpoint
        self._send, self._receive = trio.open_memory_channel[SimLink](BACKLOG)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def accept(self) -> Link:
        try:
            return await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as exc:
            raise LinkClosed("the listener is closed") from exc

    def offer(self, link: SimLink) -> None:
        """A link has been dialled. Raises OSError when too many wait."""
        try:
            self._send.send_nowait(link)
        except trio.WouldBlock:
            raise OSError(errno.ECONNREFUSED, f"too many connections wait at {self._endpoint}") from None

    def close(self) -> None:
        if self._network.listeners.get(self._endpoint) is self:
            del self._network.listeners[self._endpoint]
        self._send.close()
        try:
            while True:
                self._receive.receive_nowait().close()
        except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            self._receive.close()


class SimTransport(Transport):
    """The network as ``owner`` sees it. Made by :meth:`SimNetwork.of`."""

    def __init__(self, network: SimNetwork, owner: str) -> None:
        self._network = network
        self._owner = owner

    async def listen(self, endpoint: Endpoint) -> Listener:
        await trio.lowlevel.checkpoint()
        network = self._network
        if endpoint.port == 0:
            endpoint = attrs.evolve(endpoint, port=next(network.ports))
        if endpoint in network.listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {endpoint}: address already in use")
        listener = network.listeners[endpoint] = SimListener(network, self._owner, endpoint)
        return listener

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return await self._network.connect(self._owner, endpoint)


class SimNetwork:
    """All links of a simulation.

    Each party dials and listens with a transport of its own, :meth:`of`, so that a link has a name:
    ``LinkName("stage-0", "stage-1", 0)`` is the first one that stage 0 has dialled to stage 1. In a chain,
    lanes are dialled from each stage to the next, and return streams from the last one to stage 0.

    Args:
        seed: of all dice.
        conditions: of every link; or called with each link's name.
        faults: of links that will be made.
        clock: Trio's while it runs.
        tell: told what happens, for a trace.

    Attributes:
        wires: the links that are open on at least one side, in the order they were made.
        struck: when which faults have begun: a kind's value, ``crash`` or ``vanish``.
        descriptors: the open ends of links.
        unreachable: parties that do not answer: who dials them waits until it gives up.
    """

    def __init__(
        self,
        seed: int = 0,
        conditions: Conditions | Callable[[LinkName], Conditions] = PERFECT,
        faults: Iterable[LinkFault] = (),
        *,
        clock: SimClock,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.seed = seed
        self.faults = list(faults)
        self.tell = tell
        self.clock = clock
        self.wires: dict[LinkName, Wire] = {}
        self.listeners: dict[Endpoint, SimListener] = {}
        self.struck: list[tuple[float, str]] = []
        self.unreachable: set[str] = set()
        self.descriptors: dict[int, SimLink] = {}
        self.ports = itertools.count(1)
        self._conditions = conditions
        self._numbers: Counter[tuple[str, str]] = Counter()

    def of(self, owner: str) -> SimTransport:
        """The network as ``owner`` sees it."""
        return SimTransport(self, owner)

    def new_descriptor(self, link: SimLink) -> int:
        """The lowest number that no open link has, as systems give them out."""
        number = next(number for number in itertools.count(3) if number not in self.descriptors)
        self.descriptors[number] = link
        return number

    async def connect(self, dialer: str, endpoint: Endpoint) -> Link:
        """One attempt of ``dialer`` to connect. Raises OSError; waits for ever where nobody answers."""
        await trio.lowlevel.checkpoint()
        listener = self.listeners.get(endpoint)
        if self.unreachable and (dialer in self.unreachable or self._owner(endpoint) in self.unreachable):
            self.tell(f"{dialer} dials {endpoint} and hears nothing")
            await trio.sleep_forever()
        if listener is None:
            raise OSError(errno.ECONNREFUSED, f"nothing listens on {endpoint}")
        pair = (dialer, listener.owner)
        name = LinkName(*pair, self._numbers[pair])
        self._numbers[pair] += 1
        conditions = self._conditions(name) if callable(self._conditions) else self._conditions
        wire = self.make_wire(name, endpoint, conditions)
        listener.offer(wire.far)
        self.wires[name] = wire
        self.tell(f"{name} connected")
        if conditions.latency:
            try:
                await trio.sleep(2 * conditions.latency)
            except trio.Cancelled:
                wire.near.close()
                raise
        return wire.near

    def make_wire(self, name: LinkName, endpoint: Endpoint, conditions: Conditions) -> Wire:
        """A link that was dialled."""
        return Wire(self, name, endpoint, conditions)

    def _owner(self, endpoint: Endpoint) -> str | None:
        listener = self.listeners.get(endpoint)
        return None if listener is None else listener.owner

    def of_party(self, party: str) -> list[Wire]:
        """The open links that ``party`` has an end of, in the order they were made."""
        return [wire for name, wire in self.wires.items() if party in (name.dialer, name.listener)]

    def heal(self) -> None:
        """No fault begins from here on, and those go away that a link survives."""
        self.faults.clear()
        for wire in self.wires.values():
            for pipe in wire.pipes.values():
                pipe.heal()

    def crash(self, party: str) -> None:
        """The links of ``party`` end as a killed process's do: at once, and the others are told."""
        self.tell(f"{party} crashes")
        self.struck.append((trio.current_time(), "crash"))
        for wire in self.of_party(party):
            wire.reset()

    def vanish(self, party: str) -> None:
        """``party`` is cut off without a word: nothing arrives there or from there any more."""
        self.tell(f"{party} vanishes")
        self.struck.append((trio.current_time(), "vanish"))
        self.unreachable.add(party)
        for wire in self.of_party(party):
            for pipe in wire.pipes.values():
                pipe.vanish()

    def return_of(self, party: str) -> None:
        """``party`` can be reached again; it knows nothing of its old links, which are reset."""
        self.unreachable.discard(party)
        for wire in self.of_party(party):
            wire.reset()
