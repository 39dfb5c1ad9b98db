"""A whole chain in one process, on virtual time, over links that fail as they are told: ``skippy sim``.

In the order in which it is read best: ``scenario`` says what a seed stands for; ``clock``, ``pipes``,
``network``, ``engine`` and ``cluster`` are the world it happens in, ``faults`` what goes wrong there;
``clients`` and ``peers`` are those who ask, and ``oracle`` knows what they must get; ``invariants`` is what
must hold, ``running`` one seed from beginning to end, ``batch`` many. ``table`` is the other use of the same
world, ``skippy failure-table``: what passes is cut into frames (``cutting``, ``tapping``), and one of them is
struck (``watching``, ``lies``).

Here live the simulated network and its faults, the cluster of toy stages on it, and what must always hold. It
may import anything up to :mod:`skippy.embed`; only :mod:`skippy.cli` imports it. Never here: anything that a
real server needs, real sockets, threads, or clocks and dice that do not come from the seed.
"""
