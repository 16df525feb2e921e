"""The handler for an app's own log, and what is made of a failure before it is written."""

import concurrent.futures
import logging
import logging.config

import pytest

import stormline
from stormline.client import netlog as client_netlog
from stormline.client.trace import causes_of
from stormline.core import errors
from stormline.core import limits_netlog as limits
from stormline.core.phase import Phase
from stormline.net import logfile
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Failure, Line
from stormline.telemetry.timeline import CallRecord

WAIT_S = 30.0


@pytest.fixture(name="logger")
def _logger(tmp_path):
    """Give a logger with a handler; what it says is read by `said`."""
    handler = stormline.NetworkLogHandler(tmp_path, level="INFO")
    logger = logging.Logger("shop", logging.DEBUG)
    logger.addHandler(handler)
    yield logger
    handler.close()


def said(folder):
    entries = netlog.read(logfile.read_folder(folder)).entries
    return [entry.record for entry in entries if isinstance(entry.record, Line)]


def flush(logger):
    logger.handlers[0].flush()


def test_handler_keeps_level_logger_and_text_and_obeys_its_level(logger, tmp_path):
    logger.debug("unseen")
    logger.info("order %d of %s", 7, "ann")
    logger.error("bad")
    flush(logger)
    first, second = said(tmp_path)
    assert (first.level, first.name, first.logger, first.text) == (20, "INFO", "shop", "order 7 of ann")
    assert (second.level, second.text, second.trace) == (40, "bad", "")


def test_handler_keeps_the_traceback_apart(logger, tmp_path):
    try:
        raise KeyError("cart")
    except KeyError:
        logger.exception("it broke")
    flush(logger)
    (line,) = said(tmp_path)
    assert line.text == "it broke"
    assert line.trace.startswith("Traceback (most recent call last):")
    assert line.trace.endswith("KeyError: 'cart'")


def test_handler_with_a_formatter_keeps_what_that_makes(logger, tmp_path):
    logger.handlers[0].setFormatter(logging.Formatter("<%(levelname)s> %(message)s"))
    try:
        raise KeyError("cart")
    except KeyError:
        logger.exception("it broke")
    flush(logger)
    (line,) = said(tmp_path)
    assert line.text.startswith("<ERROR> it broke\nTraceback")
    assert line.trace == ""


def test_handler_formats_nothing_that_is_below_its_level_or_cannot_be_kept(logger):
    class Dear:
        def __str__(self):
            raise AssertionError("it was formatted")

    logger.debug("%s", Dear())
    logger.handlers[0].store.problem = "full"
    logger.error("%s", Dear())


def test_handler_never_raises_whatever_the_line(logger, tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)

    class Broken:
        def __str__(self):
            raise ValueError("no text")

    logger.error("%d", "no number")
    logger.error("%s", Broken())
    logger.error("\ud800 lone")
    logger.error("x" * (10 * limits.NETLOG_TEXT_CHARS_MAX))
    logger.error(12)
    flush(logger)
    texts = [line.text for line in said(tmp_path)]
    assert texts == ["? lone", "x" * limits.NETLOG_TEXT_CHARS_MAX, "12"]


def test_handler_masks_credentials(logger, tmp_path):
    logger.error("GET https://ann:hunter22@a.example/x?token=abc Authorization: Bearer abcdef")
    flush(logger)
    (line,) = said(tmp_path)
    assert line.text == "GET https://***@a.example/x?token=*** Authorization: ***"


def test_handler_is_made_by_dict_config(tmp_path):
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"net": {"class": "stormline.NetworkLogHandler", "folder": str(tmp_path)}},
            "loggers": {"app.dict": {"handlers": ["net"], "level": "INFO"}},
        }
    )
    logger = logging.getLogger("app.dict")
    try:
        logger.info("configured")
    finally:
        (handler,) = logger.handlers
        logger.removeHandler(handler)
        handler.close()
    assert [line.text for line in said(tmp_path)] == ["configured"]


def test_two_handlers_of_one_folder_share_a_store_and_the_first_close_ends_nothing(tmp_path):
    first, second = stormline.NetworkLogHandler(tmp_path), stormline.NetworkLogHandler(str(tmp_path))
    assert first.store is second.store
    record = logging.makeLogRecord({"msg": "here"})
    first.close()
    first.close()
    first.handle(record)
    second.handle(record)
    second.close()
    assert [line.text for line in said(tmp_path)] == ["here"]


def test_handler_that_nobody_closed_ends_with_its_last_reference(tmp_path):
    handler = stormline.NetworkLogHandler(tmp_path)
    store = handler.store
    handler.handle(logging.makeLogRecord({"msg": "here"}))
    del handler
    store._worker.join(WAIT_S)
    assert not store._worker.is_alive()
    assert [line.text for line in said(tmp_path)] == ["here"]


def test_handler_serves_many_threads(logger, tmp_path):
    def work(name):
        for number in range(50):
            logger.info("%s %d", name, number)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, name) for name in "abcd"]:
            done.result()
    flush(logger)
    texts = [line.text for line in said(tmp_path)]
    for name in "abcd":
        assert [text for text in texts if text.startswith(name)] == [f"{name} {number}" for number in range(50)]


@pytest.mark.parametrize(
    "options", [{"bytes_max": 5}, {"key": "nonsense"}, {"key": "A" * 43}], ids=["bytes", "text", "point"]
)
def test_handler_settings_that_cannot_be_are_refused(tmp_path, options):
    with pytest.raises(errors.ConfigError):
        stormline.NetworkLogHandler(tmp_path, **options)


# -- failures ---------------------------------------------------------------------------------------------------------
def test_failure_is_cut_masked_and_its_times_are_milliseconds():
    call = CallRecord(call_id="c", started_at_ms=1, method="GET", host="h", path="/reset/0123456789abcdef0123456789")
    story = [(0.0015, "try direct"), (1.5, "first\nsecond " + "x " * 500), (2.0, "token=hunter22")]
    found = client_netlog.masked(Failure(at_ms=1, call=call, story=story, causes=["A: b", "C: https://u:p@h/"]))
    assert found.call.path == "/reset/***"
    assert call.path != found.call.path, "the record that others hold was changed"
    assert [at for at, _ in found.story] == [1.5, 1500.0, 2000.0]
    assert found.story[1][1].startswith("first second x")
    assert len(found.story[1][1]) == limits.NETLOG_STORY_CHARS_MAX
    assert found.story[2][1] == "token=***"
    assert found.causes == ["A: b", "C: https://***@h/"]


def test_causes_name_the_chain_and_quote_only_what_is_ours():
    error = errors.ConnectError("no connection", phase=Phase.CONNECT, maybe_delivered=False)
    error.__cause__ = OSError(111, "Connection refused")
    error.__cause__.__context__ = ValueError("the caller's own words")
    assert causes_of(error) == ["ConnectError: no connection", "ConnectionRefusedError: [111] Connection refused",
                                "ValueError"]  # fmt: skip
    last = ValueError()
    for _ in range(100):
        last, before = ValueError(), last
        last.__cause__ = before
    assert len(causes_of(last)) == limits.NETLOG_CAUSES_MAX
