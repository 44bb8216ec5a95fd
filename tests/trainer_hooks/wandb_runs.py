"""Reads the files written by an offline wandb run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LOG_BLOCK = 32 * 1024


def records(log: bytes) -> Iterator[Any]:
    """Messages of a .wandb file: 7 bytes of header, then LevelDB's log: blocks of chunks of crc, length, type, data."""
    from wandb.proto import wandb_internal_pb2

    message, position = b"", 7
    while position + 7 <= len(log):
        if (left := LOG_BLOCK - position % LOG_BLOCK) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", log, position + 4)
        if position + 7 + length > len(log):
            # The rest is being written.
            return
        message += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def read_run(directory: Path) -> dict[str, list[Any]]:
    """Records by type, once the service has written the last one."""
    from google.protobuf.message import DecodeError

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        by_type: dict[str, list[Any]] = {}
        for path in directory.glob("wandb/offline-run-*/run-*.wandb"):
            # What is being written may be there in part.
            with suppress(DecodeError):
                for record in records(path.read_bytes()):
                    kind = record.WhichOneof("record_type")
                    by_type.setdefault(kind, []).append(getattr(record, kind))
        if "exit" in by_type:
            return by_type
        time.sleep(0.02)
    raise AssertionError(f"no finished run in {directory}")


def point(history: Any) -> dict[str, Any]:
    """One logged point, without wandb's own keys; what is not one number is a dict of its parts."""
    items: dict[str, Any] = {}
    for item in history.item:
        value = json.loads(item.value_json)
        name, *parts = item.nested_key or [item.key]
        if parts:
            items.setdefault(name, {})["/".join(parts)] = value
        else:
            items[name] = value
    return {name: value for name, value in items.items() if not name.startswith("_")}
