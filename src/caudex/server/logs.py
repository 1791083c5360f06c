"""How the server writes its log: lines for people, or one JSON object a line for machines. Always on stderr."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["text", "json"]

LOGGERS = ("caudex", "uvicorn.error", "uvicorn.access")


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


class JSONFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; the activity line's figures as fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "figures", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, log_format: LogFormat, *, access_log: bool) -> None:
    """Send the server's and uvicorn's loggers to stderr. The root logger, the application's own, is left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level.lower() == "info":
        logging.getLogger("uvicorn.error").setLevel("WARNING")  # Its start and stop lines repeat ours.
    if not access_log:
        logging.getLogger("uvicorn.access").setLevel("WARNING")
