"""Lines of the log."""

import logging

from rwkv_batch.logs import LineFormatter

FORM = "%(asctime)s %(levelname)s %(message)s"


def test_a_line_has_the_time_that_logging_writes():
    ours, theirs = LineFormatter(FORM), logging.Formatter(FORM)
    for created in (1.0, 1.9996, 2.0, 1.5, 1e9, 1e9 + 0.0014, 1e9 + 3600.999):
        record = logging.makeLogRecord({"msg": "ready", "levelname": "INFO"})
        record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
        assert ours.format(record) == theirs.format(record)
