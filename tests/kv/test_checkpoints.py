"""Where prompts are cut for their state."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skippy.kv.checkpoints import checkpoints
from skippy.kv.settings import KvSettings


@pytest.mark.parametrize(
    ("length", "settings", "expected"),
    [
        (2214, KvSettings(min_tokens=256, stride_tokens=128), (2176,)),
        (2176, KvSettings(min_tokens=256, stride_tokens=128), (2048,)),
        (160, KvSettings(min_tokens=64, stride_tokens=32, record_limit=0), (64, 96, 128)),
        (160, KvSettings(min_tokens=64, stride_tokens=128, record_limit=0), (64, 128)),
        (160, KvSettings(min_tokens=50, stride_tokens=32, record_limit=0), (64, 96, 128)),
        (64, KvSettings(min_tokens=64), ()),
        (65, KvSettings(min_tokens=64), (64,)),
        (10_000, KvSettings(record_limit=1), ()),
        # 64 to 16384 in four steps: 256, 1024, 4096; and the longest.
        (16_384, KvSettings(min_tokens=64, record_limit=5), (256, 1024, 4096, 16_320)),
        (300, KvSettings(min_tokens=64, record_limit=100), (64, 128, 192, 256)),
    ],
)
def test_lengths(length: int, settings: KvSettings, expected: tuple[int, ...]) -> None:
    assert checkpoints(length, settings) == expected


@given(
    length=st.integers(0, 5000),
    least=st.integers(1, 300),
    stride=st.integers(1, 300),
    limit=st.integers(0, 8),
    restored=st.integers(0, 5000),
)
def test_what_always_holds(length: int, least: int, stride: int, limit: int, restored: int) -> None:
    settings = KvSettings(min_tokens=least, stride_tokens=stride, record_limit=limit)
    lengths = checkpoints(length, settings, restored=restored)
    assert list(lengths) == sorted(set(lengths))
    assert all(max(restored, least - 1) < rung < length for rung in lengths)
    assert all(rung % min(stride, least) == 0 for rung in lengths)
    assert not limit or len(lengths) < limit
    everything = checkpoints(length, settings)
    if limit != 1:
        longest = (length - 1) // settings.grid * settings.grid
        assert longest < least or everything[-1] == longest
