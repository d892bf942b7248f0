"""Traces of spot machines: what is shipped, what is read, and what is refused."""

import json

import pytest

from clouds.traces import DEFAULT_TRACES, SHIPPED, TraceSet, ZoneTrace, read_traces
from echo2.errors import UserError


def write(folder, name, **content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"metadata": {"gap_seconds": 60}} | content))
    return folder


def test_ten_sets_of_several_zones_are_shipped_with_their_source():
    sets = read_traces(SHIPPED)
    assert len(sets) == 10 and all(len(each.zones) > 1 for each in sets)
    assert {each.cloud for each in sets} == {"aws", "gcp"}
    assert {zone.region for zone in sets[0].zones} == {"us-east-1", "us-east-2", "us-west-2"}
    assert [each.name for each in read_traces(DEFAULT_TRACES)] == ["aws-08-27-2023 v100_1"]
    assert "github.com/skypilot-org/spot-traces" in (SHIPPED / "SOURCE.md").read_text(encoding="utf-8")


def test_a_list_and_its_runs_are_the_same_trace(tmp_path):
    write(tmp_path / "aws-plain", "us-east-1a_v100_1.json", data=[0, 0, 2, 2, 2, 0, 16], prices=[0.9] * 7)
    write(tmp_path / "aws-short", "us-east-1a_v100_1.json", runs=[[0, 2], [2, 3], [0, 1], [16, 1]])
    plain, short = read_traces(tmp_path)
    assert plain.zones == short.zones and plain.most_machines == 16 and plain.duration_s == 420.0
    assert plain.changes() == [
        (0.0, "us-east-1a", 0),
        (120.0, "us-east-1a", 2),
        (300.0, "us-east-1a", 0),
        (360.0, "us-east-1a", 16),
    ]


def test_a_zone_that_flickers_for_two_days_is_read_in_no_time():
    flicker = tuple((second % 5, 1) for second in range(200_000))
    found = TraceSet("made", "aws", (ZoneTrace("us-east-1a", 1.0, flicker),))
    assert len(found.changes()) == 200_000
    assert found.mean(lambda machines: machines) == pytest.approx(2.0)


@pytest.mark.parametrize(("gap_s", "intervals"), [(1e9, 3), (60, 10**12)])
def test_a_zone_that_was_watched_for_years_is_refused_with_the_numbers(tmp_path, gap_s, intervals):
    write(tmp_path / "aws-x", "us-east-1a_v100_1.json", metadata={"gap_seconds": gap_s}, runs=[[1, intervals]])
    with pytest.raises(UserError, match=f"{intervals:,} intervals of gap_seconds = .* days, which exceeds 366"):
        read_traces(tmp_path)


def test_kinds_of_machines_in_one_folder_are_sets_of_their_own(tmp_path):
    for name in ("us-west-2a_v100_1", "us-west-2b_v100_1", "us-west-2a_k80_8"):
        write(tmp_path / "aws-x", f"{name}.json", data=[1])
    assert [(each.name, len(each.zones)) for each in read_traces(tmp_path)] == [("aws-x k80_8", 1), ("aws-x v100_1", 2)]


def test_a_set_lasts_as_long_as_all_its_zones_were_watched():
    zones = ZoneTrace("r-1a", 60.0, ((1, 3),)), ZoneTrace("r-1b", 60.0, ((0, 1), (1, 1), (0, 2)))
    traces = TraceSet("x", "aws", zones)
    assert traces.duration_s == 180.0
    assert traces.changes() == [(0.0, "r-1a", 1), (0.0, "r-1b", 0), (60.0, "r-1b", 1), (120.0, "r-1b", 0)]
    assert traces.mean(float) == pytest.approx(4 / 3)
    assert traces.mean(float, most_s=90.0) == pytest.approx(4 / 3) and traces.mean(float, most_s=60.0) == 1.0


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("us-east-1a_v.json", "no JSON", "is no spot trace"),
        ("us-east-1a_v.json", '{"data": [1]}', "'metadata' is missing"),
        ("us-east-1a_v.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds = 0"),
        ("us-east-1a_v.json", '{"metadata": {"gap_seconds": 60}, "data": []}', "it has no data"),
        ("us-east-1a_v.json", '{"metadata": {"gap_seconds": 60}, "data": [1, -1]}', "-1 is no number"),
        ("us-east-1a_v.json", '{"metadata": {"gap_seconds": 60}, "runs": [[1]]}', "is no spot trace"),
        ("us-east-1a_v.json", "[1]", "is no spot trace"),
        ("figures.json", "{}", "ZONE_MACHINE.json"),
        ("notes.txt", "", "has no .json files"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_file_and_why(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"is|has") as refusal:
        read_traces(tmp_path)
    sentence = str(refusal.value)
    assert part in sentence and str(tmp_path) in sentence and "\n" not in sentence
