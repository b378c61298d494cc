"""The form of log lines."""

import io
import logging

from cluster.observe.logging import event, setup


def test_an_event_is_one_line_of_words() -> None:
    text = event("request_done", request_id="r-1", text='a "b"\nc', took_s=0.123456789, error=None, count=3)
    assert text == 'event=request_done request_id=r-1 text="a \\"b\\"\\nc" took_s=0.123457 count=3'


def test_setup_formats_events_and_foreign_messages() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup("info", stream)
        logging.getLogger("tandem.x").info(event("ready", worker="worker-0"))
        logging.getLogger("library").warning("two\nlines")
        logging.getLogger("tandem.x").debug(event("hidden"))
        try:
            raise ValueError("bad\nthing")
        except ValueError:
            logging.getLogger("tandem.x").exception(event("failed"))
    finally:
        root.handlers[:], root.level = handlers, level
    ready, foreign, failed = stream.getvalue().splitlines()
    assert " info event=ready worker=worker-0 logger=tandem.x" in ready
    assert ' warning event=log text="two\\nlines" logger=library' in foreign
    assert " error event=failed logger=tandem.x trace=" in failed and "ValueError: bad" in failed
