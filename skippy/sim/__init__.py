"""A whole chain in one process, on virtual time, over links that fail as they are told: ``skippy sim``.

Here live the simulated network and its faults, the cluster of toy stages on it, and what must always hold. It
may import anything up to :mod:`skippy.embed`; only :mod:`skippy.cli` imports it. Never here: anything that a
real server needs, real sockets, threads, or clocks and dice that do not come from the seed.
"""
