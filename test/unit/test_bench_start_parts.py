"""bench/start_parts.py shows the parts of a start, in the order of time."""

import pytest

from bench import start_parts

pytestmark = pytest.mark.thorough

RUN = [start_parts.ENGINE, "process.run"]


def test_parts_follow_each_other_without_gaps():
    samples = [(0.1, []), (0.2, [start_parts.ENGINE, "import torch"]), (0.9, [*RUN, "a.load"])]
    samples += [(1.0, [*RUN, "a.load", "a.read"]), (1.5, [*RUN, "process.Service.serve"])]
    found = start_parts.parts(samples, depth=2, least=0)
    assert found == [
        (0.1, 0.2, start_parts.OUTSIDE),
        (0.2, 0.9, "import torch"),
        (0.9, 1.5, "process.run > a.load"),
        (1.5, 1.5, "process.run > process.Service.serve"),
    ]


def test_short_parts_are_one_together_and_count_to_what_was_before_where_that_is_short_too():
    turns = [(1 + i / 100, [*RUN, f"a.{'bc'[i % 2]}"]) for i in range(20)]
    samples = [(0, [*RUN, "a.long"]), *turns, (1.2, [*RUN, "a.next"]), (2.0, [*RUN, "a.short"])]
    samples += [(2.01, [*RUN, "a.next"]), (3.0, [*RUN, "process.Service.serve"])]
    found = start_parts.parts(samples, depth=2, least=0.05)
    assert [(part.begin, part.what.rpartition(" ")[2]) for part in found] == [
        (0, "a.long"),
        (1, start_parts.OTHERS),
        (1.2, "a.next"),
    ]
    assert found[-1].end == 3.0


def test_a_real_start_is_read_until_it_serves():
    samples = start_parts.started(["--device", "cpu", "--frontends", "1"])
    found = [part.what for part in start_parts.parts(samples, depth=3, least=0)]
    assert found[0] == start_parts.OUTSIDE and "import torch" in found
    assert found[-1].startswith("process.run > process.Service.serve")
