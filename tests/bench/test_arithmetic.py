"""What the benchmarks compute from what they measured."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.common import (
    OutputsDiffer,
    Report,
    Spread,
    in_turn,
    percentile,
    ratios,
    require_same_outputs,
    table,
)
from bench.load import Outcome
from bench.plots import line_chart, nice_top
from bench.prompts import cold_prompt
from bench.serving_report import Levels, Sample, ratio_table, report


def test_percentiles_are_interpolated() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == pytest.approx([10, 25, 37, 40])
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="no percentage"):
        percentile(values, 101)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The medians are 20 and 20; what the rounds say is another thing.
    assert ratios([10, 20, 30], [20, 10, 30]) == Spread(1.0, 0.5, 2.0)
    with pytest.raises(ValueError, match="longer"):
        ratios([1, 2], [1, 2, 3])


def test_a_spread_is_the_median_and_all_rounds() -> None:
    assert Spread.of([3, 1, 2, 10]) == Spread(2.5, 1, 10)
    assert Spread.of([3, 1, 2, 10]).show(1) == "2.5 (1.0 to 10.0)"
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_arms_meet_every_place_in_the_order() -> None:
    assert [in_turn("abc", number) for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_different_outputs_are_not_compared_and_are_shown() -> None:
    require_same_outputs({"one": "text", "two": "text"})
    with pytest.raises(OutputsDiffer, match=r"(?s)one: 'text'.*two: 'texts'"):
        require_same_outputs({"one": "text", "two": "texts"})


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_cold_prompt_is_its_seed_s_alone() -> None:
    assert cold_prompt(50, 1) == cold_prompt(50, 1) != cold_prompt(50, 2)
    assert len(cold_prompt(50, 1).split()) == 50


def outcome(started: float, times: list[float], tokens: int | None = None) -> Outcome:
    return Outcome(
        client=0, status=200, started=started, ended=times[-1], times=times, tokens=tokens or len(times)
    )


def test_a_sample_counts_tokens_over_the_whole_time_and_gaps_within_streams() -> None:
    sample = Sample.of([outcome(10, [11, 12, 14]), outcome(12, [13, 15])], cpu_seconds=0.5)
    assert sample.rate == 5 / 5  # from 10 to 15
    assert sample.first == [1, 1]
    assert sample.gaps == [1, 2, 2]
    assert sample.stream_rate == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert sample.cpu == 100  # milliseconds per token


def test_tokens_are_the_server_s_count_not_the_pieces() -> None:
    assert Sample.of([outcome(0, [1, 2], tokens=8)], None).rate == 4


def levels() -> Levels:
    made = Levels([1, 8], ["skippy", "llama.cpp", "llama-cpp-python"])
    for arm, rates in (("skippy", [10.0, 30.0]), ("llama.cpp", [20.0, 20.0])):
        for level in (1, 8):
            for rate in rates:
                made.add(arm, level, Sample(rate=rate, stream_rate=rate, first=[0.1], gaps=[0.01], cpu=None))
        made.cold[arm] += [1.0, 2.0] if arm == "skippy" else [2.0, 2.0]
    return made


def test_the_ratio_table_names_what_is_over_what() -> None:
    lines = ratio_table(levels(), [("skippy", "llama.cpp")]).splitlines()
    assert lines[0] == "|  | skippy / llama.cpp |"
    assert lines[2] == "| tok/s of a stream at 1 | 1.00 (0.50 to 1.50) |"
    assert lines[-1] == "| time to a cold first token | 0.75 (0.50 to 1.00) |"


def test_a_report_leaves_text_data_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = levels()
    made.add("llama-cpp-python", 1, Sample(rate=5, stream_rate=5, first=[0.1], gaps=[], cpu=2.0))
    made.cold["llama-cpp-python"] += [1.0]
    # A peer that is only measured at 1 has no ratio where the others have one.
    made.arms.remove("llama-cpp-python")
    report(made, Report(tmp_path, "serving"), "head", 800)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"serving.md", "serving.json", "serving-rate.svg", "serving-gap.svg"}
    text = (tmp_path / "serving.md").read_text()
    assert text.startswith("head\n\n")
    assert "Concurrency 8:" in text
    assert text.strip() in capsys.readouterr().out


def test_a_plot_is_svg_with_its_points_where_they_belong() -> None:
    chart = line_chart(
        "t < u", "x", "y", ["1", "8"], {"a": [Spread(10, 5, 20), None], "b": [None, Spread(5, 5, 5)]}
    )
    root = ElementTree.fromstring(chart)
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert len(circles) == 2
    assert heights[0] < heights[1]  # more is higher up
    with pytest.raises(ValueError, match="a: 1 values for 2 ticks"):
        line_chart("t", "x", "y", ["1", "8"], {"a": [None]})


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (1.0, 1.0), (1.1, 2.0), (2.2, 2.5), (99.0, 100.0), (0.03, 0.05)]
)
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert nice_top(value) == pytest.approx(top)
