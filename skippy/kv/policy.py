"""What goes first when room is needed: the least recently used, weighted by what computing it again costs.

The rule is GreedyDual (Young, "The k-server dual and loose competitiveness for paging", Algorithmica 11,
1994), once for the native sequences and once for the bytes of exported state. Each of the two has a *floor*,
which begins at 0:

* what is recorded or used gets the floor of that moment as its *base*;
* its *worth* is ``base + cost / size``;
* when something must go, it is that of least worth, among equals what was used longest ago; the floor then
  rises to its worth, if that is higher.

With equal costs this is plain LRU: what was not used since has an older, lower base. What costs ten times as
much outlives ten rounds of the rest, and then goes too: nothing stays for ever because it was expensive once.

Cost is in tokens, those that only this entry holds (:meth:`skippy.kv.cache.PrefixCache.cost`). Size is 1 for
a native sequence with cells of its own, the cost itself where cells are shared (so that all weigh the same),
and the bytes of an exported state.
"""

from __future__ import annotations

import attrs


@attrs.define(slots=True)
class Floor:
    """The floor of one kind of room; see above."""

    height: float = 0.0

    def rise(self, worth: float) -> None:
        """Something of this worth had to go."""
        self.height = max(self.height, worth)


def worth(base: float, cost: int, size: int) -> float:
    """What ``cost`` tokens, last used at ``base``, are worth in a room of which they take ``size``."""
    return base + cost / max(1, size)
