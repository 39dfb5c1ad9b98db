"""What every engine must do, by its contract: the toy, a tiny random llama, and the bundled model."""

from __future__ import annotations

import numpy as np
import pytest

from skippy.engine import ContextFullError, EngineError, Segment

from .chains import Kind, bits
from .conftest import OpenChain

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 40, 41, 97, 98, 99, 100, 101, 102]
CHUNKS = [PROMPT[:13], PROMPT[13:21], PROMPT[21:]]
OTHER = [201, 5, 17, 99, 120, 34, 8]


def test_chain_equals_unsplit_bit_for_bit(kind: Kind, open_chain: OpenChain) -> None:
    expected = bits(open_chain(kind).run(CHUNKS, steps=64))
    for inner in kind.cuts:
        assert bits(open_chain(kind, *inner).run(CHUNKS, steps=64)) == expected, inner


def test_info(kind: Kind, open_chain: OpenChain) -> None:
    first, middle, last = (s.info for s in open_chain(kind, 2, 4, context_length=100, max_sequences=3).stages)
    assert [(i.layer_start, i.layer_end, i.layer_count) for i in (first, middle, last)] == [
        (0, 2, kind.layers),
        (2, 4, kind.layers),
        (4, kind.layers, kind.layers),
    ]
    width = first.hidden_size
    assert (first.input_width, first.output_width) == (0, width)
    assert (middle.input_width, middle.output_width) == (width, width)
    assert (last.input_width, last.output_width) == (width, 0)
    assert middle.vocab_size == 0
    assert first.vocab_size == last.vocab_size > 256
    assert {i.context_length for i in (first, middle, last)} == {100}
    assert {i.max_sequences for i in (first, middle, last)} == {3}
    assert middle.kv_bytes > 0


def test_vocabulary_is_at_the_ends_only(kind: Kind, open_chain: OpenChain) -> None:
    first, middle, last = open_chain(kind, 2, 4).stages
    assert middle.vocabulary is None
    assert first.vocabulary is not None
    assert last.vocabulary is not None
    assert first.vocabulary.size == last.vocabulary.size == last.info.vocab_size


def test_boundary_is_written_into_the_given_buffer_only(kind: Kind, open_chain: OpenChain) -> None:
    first = open_chain(kind, 2).stages[0]
    size = len(PROMPT) * first.info.output_width * 4
    backing = bytearray(b"\xa5" * (size + 128))
    segment = Segment(sequence=0, position=0, count=len(PROMPT), tokens=PROMPT)
    first.decode([segment], memoryview(backing)[64 : 64 + size])
    assert backing[:64] == backing[-64:] == b"\xa5" * 64
    rows = np.frombuffer(backing, dtype="<f4", count=size // 4, offset=64).reshape(len(PROMPT), -1)
    assert np.isfinite(rows).all()
    assert len({row.tobytes() for row in rows}) == len(PROMPT)


def test_unaligned_activation_gives_the_same(kind: Kind, open_chain: OpenChain) -> None:
    first, last = open_chain(kind, 3).stages
    size = len(PROMPT) * first.info.output_width * 4
    output = memoryview(bytearray(size))
    first.decode([Segment(sequence=0, position=0, count=len(PROMPT), tokens=PROMPT)], output)
    found = []
    for sequence, shift in enumerate((0, 1, 2, 3)):
        moved = bytearray(size + 8)
        moved[shift : shift + size] = output
        activation = memoryview(moved)[shift : shift + size].toreadonly()
        last.decode(
            [Segment(sequence=sequence, position=0, count=len(PROMPT), activation=activation, logits=1)]
        )
        found.append(last.logits(0).tobytes())
    assert len(set(found)) == 1


def test_several_rows_of_logits(kind: Kind, open_chain: OpenChain) -> None:
    whole, chain = open_chain(kind), open_chain(kind, 3)
    expected = whole.feed((0, PROMPT), logits=5)
    assert len(set(bits(expected))) == 5
    assert bits(chain.feed((0, PROMPT), logits=5)) == bits(expected)
    with pytest.raises(ValueError, match="logits row 5"):
        chain.last.logits(5)
    chain.feed((0, [7]), logits=0)
    with pytest.raises(ValueError, match="logits row 0"):
        chain.last.logits(0)


def test_trim_and_grow_again(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    expected = bits(chain.run(CHUNKS, steps=3))
    chain.feed((0, OTHER))
    chain.each(lambda stage: stage.trim(0, 13))
    assert [stage.length(0) for stage in chain.stages] == [13, 13]
    assert bits(chain.run(CHUNKS[1:], steps=3)) == expected[1:]
    chain.each(lambda stage: stage.trim(0, 0))
    assert bits(chain.run(CHUNKS, steps=3)) == expected
    for length in (-1, chain.last.length(0) + 1):
        with pytest.raises(ValueError, match="trimmed"):
            chain.last.trim(0, length)


def test_drop_and_use_again(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    expected = bits(chain.run(CHUNKS, steps=2))
    chain.run([OTHER], steps=2, sequence=1)
    chain.each(lambda stage: stage.drop(0))
    chain.each(lambda stage: stage.drop(0))
    assert chain.last.length(0) == 0
    assert chain.last.length(1) == len(OTHER) + 2
    assert bits(chain.run(CHUNKS, steps=2)) == expected


@pytest.mark.parametrize("length", [None, 13, 1, 0])
def test_copy(kind: Kind, open_chain: OpenChain, length: int | None) -> None:
    chain = open_chain(kind, 3)
    chain.feed((0, PROMPT[:13]))
    before = chain.feed((0, PROMPT[13:21]))
    chain.each(lambda stage: stage.copy(0, 2, length))
    held = 21 if length is None else length
    assert chain.last.length(2) == held
    chain.each(lambda stage: stage.trim(0, held))
    expected = bits(chain.feed((0, OTHER)))
    chain.each(lambda stage: stage.drop(0))
    assert bits(chain.feed((2, OTHER))) == expected
    assert before


def test_copy_then_the_source_goes_on(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    chain.feed((0, PROMPT))
    chain.each(lambda stage: stage.copy(0, 1))
    expected = bits(chain.run([OTHER], steps=4, sequence=0))
    assert bits(chain.run([OTHER], steps=4, sequence=1)) == expected


def test_copy_refuses(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind)
    chain.feed((0, OTHER), (1, OTHER))
    for source, target, length in (
        (0, 0, None),
        (0, 1, None),
        (0, 2, 99),
        (0, 2, -1),
        (0, 4, None),
        (-1, 2, 1),
    ):
        with pytest.raises(ValueError, match="sequence"):
            chain.last.copy(source, target, length)
    assert [chain.last.length(sequence) for sequence in range(4)] == [7, 7, 0, 0]


def test_export_and_import(kind: Kind, open_chain: OpenChain) -> None:
    chain, fresh = open_chain(kind, 3), open_chain(kind, 3)
    chain.feed((1, OTHER))
    chain.feed((0, PROMPT))
    states = [stage.export_state(0) for stage in chain.stages]
    for stage, state in zip(fresh.stages, states, strict=True):
        stage.import_state(3, memoryview(state))
    for stage, state in zip(chain.stages, states, strict=True):
        stage.import_state(2, state)
        with pytest.raises(ValueError, match="not empty"):
            stage.import_state(2, state)
    expected = bits(chain.run([OTHER], steps=4, sequence=0))
    assert bits(chain.run([OTHER], steps=4, sequence=2)) == expected
    assert bits(fresh.run([OTHER], steps=4, sequence=3)) == expected


def test_empty_state(kind: Kind, open_chain: OpenChain) -> None:
    stage = open_chain(kind).last
    stage.import_state(1, stage.export_state(0))
    assert stage.length(1) == 0


def test_damaged_state_is_refused(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    expected = bits(chain.feed((0, PROMPT)))
    first, last = chain.stages
    good = bytes(last.export_state(0))
    flipped = bytearray(good)
    flipped[-5] ^= 1
    for bad in (b"", good[:10], good[:-1], good + b"\0", bytes(flipped), b"x" * 400, first.export_state(0)):
        with pytest.raises(EngineError):
            last.import_state(1, bad)
        assert last.length(1) == 0
    assert bits(chain.feed((1, PROMPT))) == expected


def test_state_longer_than_the_context_is_refused(kind: Kind, open_chain: OpenChain) -> None:
    big, small = open_chain(kind, context_length=64), open_chain(kind, context_length=16)
    big.feed((0, PROMPT))
    with pytest.raises(EngineError):
        small.last.import_state(0, big.last.export_state(0))
    assert small.last.length(0) == 0


def _bad_first_segments() -> list[Segment]:
    def segment(**fields: object) -> Segment:
        defaults = {"sequence": 0, "position": 7, "count": 2, "tokens": [1, 2]}
        return Segment(**{**defaults, **fields})  # type: ignore[arg-type]

    return [
        segment(sequence=4),
        segment(sequence=-1),
        segment(position=6),
        segment(position=8),
        segment(position=-1),
        segment(count=0, tokens=[]),
        segment(count=3),
        segment(tokens=[1, -1]),
        segment(tokens=[1, 2**31]),
        segment(tokens=[1, 2**70]),
        segment(tokens=[1, 1.5e300]),
        segment(tokens=None),
        segment(activation=memoryview(bytes(64))),
        segment(tokens=None, activation=memoryview(bytes(64))),
        segment(logits=1),
        segment(count=513, tokens=[1] * 513),
    ]


@pytest.mark.parametrize("segment", _bad_first_segments())
def test_bad_segments_are_refused_whole(segment: Segment, toy_kind: Kind, open_chain: OpenChain) -> None:
    _check_refused(segment, toy_kind, open_chain)


def test_bad_segments_are_refused_whole_by_llama(tiny_kind: Kind, open_chain: OpenChain) -> None:
    for segment in _bad_first_segments():
        _check_refused(segment, tiny_kind, open_chain)


def _check_refused(segment: Segment, kind: Kind, open_chain: OpenChain) -> None:
    first = open_chain(kind, 3).stages[0]
    width = first.info.output_width * 4
    first.decode([Segment(sequence=0, position=0, count=7, tokens=OTHER)], memoryview(bytearray(7 * width)))
    good = Segment(sequence=1, position=0, count=1, tokens=[3])
    output = memoryview(bytearray((1 + segment.count) * width))
    with pytest.raises((ValueError, ContextFullError)):
        first.decode([good, segment], output)
    assert not any(output)
    assert [first.length(sequence) for sequence in range(4)] == [7, 0, 0, 0]


def test_bad_outputs_and_batches(kind: Kind, open_chain: OpenChain) -> None:
    first, last = open_chain(kind, 3).stages
    width = first.info.output_width * 4
    segment = Segment(sequence=0, position=0, count=2, tokens=[1, 2])
    for output in (
        None,
        memoryview(bytes(2 * width)),
        memoryview(bytearray(width)),
        memoryview(bytearray(4)),
    ):
        with pytest.raises(ValueError, match="output"):
            first.decode([segment], output)
    with pytest.raises(ValueError, match="at least one"):
        first.decode([], memoryview(bytearray(0)))
    with pytest.raises(ValueError, match="twice"):
        first.decode([segment, segment], memoryview(bytearray(4 * width)))
    activation = memoryview(bytearray(width))
    for bad in (
        Segment(sequence=0, position=0, count=1, activation=activation[:-4]),
        Segment(sequence=0, position=0, count=1, activation=activation[::2]),
        Segment(sequence=0, position=0, count=1, tokens=[1]),
        Segment(sequence=0, position=0, count=1, activation=activation, logits=2),
    ):
        with pytest.raises(ValueError, match="sequence 0"):
            last.decode([bad])
    with pytest.raises(ValueError, match="no boundary output"):
        last.decode([Segment(sequence=0, position=0, count=1, activation=activation)], activation)
    assert first.length(0) == last.length(0) == 0


def test_context_is_full(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, context_length=30, max_sequences=2)
    chain.feed((0, [1] * 29))
    chain.feed((1, [1] * 30))
    expected = bits(chain.feed((0, [2])))
    for sequence in (0, 1):
        with pytest.raises(ContextFullError, match="30"):
            chain.feed((sequence, [2]))
    assert [chain.last.length(sequence) for sequence in (0, 1)] == [30, 30]
    chain.last.trim(0, 29)
    assert bits(chain.feed((0, [2]))) == expected


def test_many_rows_in_one_decode(kind: Kind, open_chain: OpenChain) -> None:
    whole, chain = (open_chain(kind, *inner, context_length=600) for inner in ((), (3,)))
    tokens = [(index * 37) % 250 for index in range(512)]
    assert bits(chain.feed((0, tokens))) == bits(whole.feed((0, tokens)))


def test_ids_out_of_range(kind: Kind, open_chain: OpenChain) -> None:
    stage = open_chain(kind).last
    for sequence in (-1, 4, 2**40):
        for call in (stage.length, stage.drop, stage.export_state):
            with pytest.raises(ValueError, match="outside"):
                call(sequence)
        with pytest.raises(ValueError, match="outside"):
            stage.trim(sequence, 0)
        with pytest.raises(ValueError, match="outside"):
            stage.import_state(sequence, b"")


def test_close_twice(kind: Kind, open_chain: OpenChain) -> None:
    stage = open_chain(kind).last
    stage.close()
    stage.close()


def test_embeddings_are_the_last_rows_of_whole_models(kind: Kind, open_chain: OpenChain) -> None:
    whole = open_chain(kind).last
    assert whole.info.pooling == "last"
    segment = Segment(0, 0, len(PROMPT), tokens=PROMPT)
    rows = whole.embed(segment)
    assert rows.shape == (len(PROMPT), whole.info.hidden_size)
    assert np.isfinite(rows).all()
    assert whole.length(0) == len(PROMPT)
    whole.drop(0)
    # The rest of the engine's work is as it was.
    whole.decode([Segment(0, 0, len(PROMPT) - 1, tokens=PROMPT[:-1])])
    one = Segment(0, len(PROMPT) - 1, 1, tokens=PROMPT[-1:])
    np.testing.assert_allclose(whole.embed(one)[0], rows[-1], rtol=0.05, atol=0.5)
    whole.trim(0, len(PROMPT) - 1)
    whole.decode([Segment(0, len(PROMPT) - 1, 1, tokens=PROMPT[-1:], logits=1)])
    logits = whole.logits(0).tobytes()
    other = open_chain(kind).last
    other.decode([Segment(0, 0, len(PROMPT) - 1, tokens=PROMPT[:-1])])
    other.decode([Segment(0, len(PROMPT) - 1, 1, tokens=PROMPT[-1:], logits=1)])
    assert other.logits(0).tobytes() == logits
    part = open_chain(kind, 2).last
    assert part.info.pooling is None
    with pytest.raises(EngineError):
        part.embed(one)
