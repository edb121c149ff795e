"""A run's metrics as TensorBoard events: the bytes of its event file, which `record.Run` appends to like its own logs.

A file is a sequence of records: length, its checksum, a serialised ``Event``, its checksum. ``tensorboardX`` brings the
message types and the checksum; its writer is not used, since it puts events on a queue of ten for a thread that ends
if the disk is full, and then the training would hang.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from math import nan
from typing import Any

TAGS = {
    "loss": "loss/train",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "step_ms": "speed/step_ms",
    "tokens_per_s": "speed/tokens_per_s",
}
"""The metrics of a step, by their names in TensorBoard."""
VALIDATION = "loss/validation"
FILES = "events.out.tfevents.*"
"""The beginning of an event file's name, by which TensorBoard finds it; each folder of ``runs/`` is a run to it."""


def new_name() -> str:
    """Return a file name that sorts after those of earlier event files."""
    return FILES.replace("*", f"{time.time():017.6f}.cpuopt")


def opening() -> bytes:
    """Return the first events of a file, which also tell a reader to discard earlier files."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    version = Event(wall_time=time.time(), file_version="brain.Event:2")
    start = Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START))
    return _record(version) + _record(start)


def step_event(metrics: Mapping[str, Any]) -> bytes:
    """Return the event with the metrics of a step; None stands for a number that is not finite."""
    return _scalars(metrics["step"], {tag: metrics[name] for name, tag in TAGS.items()})


def validation(step: int, loss: float) -> bytes:
    """Return the event with a validation loss."""
    return _scalars(step, {VALIDATION: loss})


def _scalars(step: int, values: Mapping[str, float | None]) -> bytes:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values_of = [Summary.Value(tag=tag, simple_value=nan if x is None else x) for tag, x in values.items()]
    return _record(Event(wall_time=time.time(), step=step, summary=Summary(value=values_of)))


def _record(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    body: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, body))
    return length + next(sums) + body + next(sums)
