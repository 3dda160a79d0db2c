"""Lines of the log."""

import json
import logging

import pytest

from rwkv_batch.logs import JsonFormatter, LineFormatter

FORM = "%(asctime)s %(levelname)s %(message)s"


def test_a_line_has_the_time_that_logging_writes():
    ours, theirs = LineFormatter(FORM), logging.Formatter(FORM)
    for created in (1.0, 1.9996, 2.0, 1.5, 1e9, 1e9 + 0.0014, 1e9 + 3600.999):
        record = logging.makeLogRecord({"msg": "ready", "levelname": "INFO"})
        record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
        assert ours.format(record) == theirs.format(record)


@pytest.mark.parametrize(
    "odd", ["\ud800", 10**30, object, "\u2028\n\x00", 0.1, None, {"a": [1, "ü"]}], ids=ascii
)
def test_a_line_of_json_is_as_the_library_of_python_writes_it(odd):
    record = logging.makeLogRecord({"msg": "ready", "levelname": "INFO", "fields": lambda: {"odd": odd}})
    record.created = 1e9 + 0.25
    line = {
        "time": "2001-09-09T01:46:40.250Z",
        "level": "INFO",
        "process": "one",
        "message": "ready",
        "odd": odd,
    }
    assert JsonFormatter("one").format(record) == json.dumps(line, ensure_ascii=False, default=str)


def test_lines_of_json_have_the_time_of_each():
    formatter, record = JsonFormatter("one"), logging.makeLogRecord({"msg": "ready"})
    found = []
    for record.created in (1e9, 1e9 + 1.5, 1e9 + 1.75, 1e9):
        found.append(json.loads(formatter.format(record))["time"][-7:])
    assert found == ["40.000Z", "41.500Z", "41.750Z", "40.000Z"]
