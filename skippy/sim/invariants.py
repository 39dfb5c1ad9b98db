"""What must hold in every chain: at any time, when nobody asks for anything, and at the end."""

from __future__ import annotations

from collections import Counter

import trio

from skippy.stage.keeping import StageCache

from .cluster import SimCluster, party
from .network import SimNetwork
from .scenario import Scenario
from .violation import Violation, require


def check_always(cluster: SimCluster) -> None:
    """After every pass of the scheduler, so cheap: what is shared out is there, and not more than once."""
    for index, running in enumerate(cluster.running):
        if running is None:
            continue
        free, used = running.scheduler.free_sequences, running.frame_budget.used
        if not 0 <= free <= running.sequences:
            raise Violation(f"{party(index)} has {free} free sequences of {running.sequences}")
        if used < 0:
            raise Violation(f"{party(index)} has given back {-used} bytes of frames that it did not take")
    front = cluster.front
    if front is not None:
        if front.pool.owed_by_idle:
            raise Violation("a lane is idle that still owes a reply")
        gate = front.gate
        if not 0 <= gate.reserved_tokens <= gate.kv_tokens:
            raise Violation(f"{gate.reserved_tokens} cache positions of {gate.kv_tokens} are reserved")


def check_idle(scenario: Scenario, cluster: SimCluster, *, altered: bool = False) -> None:
    """While every lane is connected and nobody asks: nothing is held for anyone, and nothing is lost.

    Args:
        altered: whether bytes have arrived changed, so that an audit may have found what was made of them.
    """
    front = cluster.front
    assert front is not None
    gate, pool = front.generator.gate, front.pool
    require(gate.reserved_tokens == 0, f"{gate.reserved_tokens} cache positions are reserved for nobody")
    require(gate.queue_depth == 0, f"{gate.queue_depth} requests wait, and nobody has asked")
    require(gate.running == 0, f"{gate.running} requests run, and nobody has asked")
    require(pool.connected == pool.size, f"{pool.connected} lanes of {pool.size} are connected")
    require(pool.idle_lanes == pool.size, f"{pool.idle_lanes} lanes of {pool.size} are idle")
    for index, running in enumerate(cluster.running):
        assert running is not None
        name, context = party(index), running.stage.context
        free = context.scheduler.free_sequences
        total = scenario.native_sequences
        require(free == total, f"{name} has {free} of {total} sequences free")
        held = {number: running.engine.length(number) for number in range(total)}
        if context.cache is not None:
            _check_cache(name, context.cache, held, altered)
        require(not any(held.values()), f"{name} keeps rows for nobody, by sequence: {held}")
        require(context.frame_budget.used == 0, f"{name} holds {context.frame_budget.used} bytes of frames")
        require(running.runtime.idle, f"{name} has work for its engine that nobody waits for")
        require(not context.hub.waiting, f"{name} waits for {context.hub.waiting} return streams")


def _check_cache(name: str, cache: StageCache, held: dict[int, int], altered: bool) -> None:
    """What is remembered is idle, and in the engine; takes that out of ``held``, which is by sequence."""
    entries = cache.index.entries()
    most, counters = cache.settings.max_entries, cache.index.counters
    require(len(entries) <= most, f"{name} remembers {len(entries)} prefixes, at most {most}")
    busy = [entry for entry in entries if entry.live or entry.refs]
    require(not busy, f"{name} has {len(busy)} remembered prefixes in use by nobody")
    differ = counters.audit_failures and not altered
    require(not differ, f"{name} has remembered what it computes otherwise")
    for entry in entries:
        require(entry.sequence is not None or entry.state is not None, f"{name} remembers a prefix nowhere")
        if entry.sequence is not None:
            rows = held.pop(entry.sequence, 0)
            require(rows >= entry.length, f"{name} holds {rows} of {entry.length} remembered rows")


def check_links(scenario: Scenario, network: SimNetwork) -> None:
    """One for each lane on every edge, spares where they are asked for, and a return stream each at most.

    Every accepted connection has its task, and every such task its connection.
    """
    links = Counter((name.dialer, name.listener) for name in network.wires)
    there = f"open are {', '.join(map(str, network.wires))}"
    last = len(scenario.splits) - 1
    spare = int(scenario.options.warm_preconnect)
    for index in range(last):
        count = links.pop((party(index), party(index + 1)), 0)
        # Stage 0 alone knows how many lanes there are; a spare of a later stage is the one its lane took.
        least, most = scenario.lanes, scenario.lanes + spare * (index + 1)
        require(
            least <= count <= most, f"{count} links from {party(index)} to the next, not {least} to {most}"
        )
    if last:
        returns = links.pop((party(last), party(0)), 0)
        require(returns <= scenario.lanes, f"{returns} return streams for {scenario.lanes} lanes; {there}")
    require(not links, f"links that should not be there: {dict(links)}")
    _check_tasks(network)


def _check_tasks(network: SimNetwork) -> None:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    serving = sum(task.name.endswith("_Connections.serve") for task in _below(root))
    require(
        serving == len(network.wires), f"{serving} tasks serve connections, and {len(network.wires)} are open"
    )


def _below(task: trio.lowlevel.Task) -> list[trio.lowlevel.Task]:
    """All tasks that were started below one."""
    found, left = list[trio.lowlevel.Task](), [task]
    while left:
        for nursery in left.pop().child_nurseries:
            left += nursery.child_tasks
            found += nursery.child_tasks
    return found


def check_end(network: SimNetwork) -> None:
    """When every stage has ended in order, nothing is left of it."""
    require(not network.wires, f"links that nobody has closed: {', '.join(map(str, network.wires))}")
    require(not network.listeners, f"listeners that nobody has closed: {len(network.listeners)}")
