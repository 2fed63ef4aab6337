"""Log lines for people (text) or machines (json)."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class TextFormatter(logging.Formatter):
    """12:00:00 INFO sparkjax.request request status=200 ..."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [clock, record.levelname, record.name, record.getMessage()]
        parts += [f"{key}={_plain(value)}" for key, value in _fields(record).items()]
        return _with_trace(self, record, " ".join(parts))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(config: Any) -> None:
    """Sends all log lines to standard error, in the level and form of `sparkjax.settings.Log`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    # These speak of every connection and request; this server has its own line for that.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "asyncio", "jax"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _plain(value: Any) -> str:
    """A value on one line, with quotes where it has spaces."""
    text = str(value)
    return json.dumps(text) if any(c <= " " or c in '"=' for c in text) or not text else text


def _with_trace(formatter: logging.Formatter, record: logging.LogRecord, line: str) -> str:
    return f"{line}\n{formatter.formatException(record.exc_info)}" if record.exc_info else line
