"""Ctrl-C and the request to end that a system sends: training stops between two steps."""

import os
import signal
from types import FrameType, TracebackType


class Stopped(Exception):
    """Training stopped at the user's wish, with its state saved."""


class Interrupt:
    """While it is entered, SIGINT and SIGTERM set `requested`, where `deferred` says that somebody looks at it.

    Otherwise, and the second time, they raise KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = self.deferred = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as it came

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.deferred or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"\nstopping after this step (again: at once) ...\n")  # print may be what was interrupted
