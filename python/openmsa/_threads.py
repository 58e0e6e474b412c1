"""torch's thread count is the core's too.

torch may bring an OpenMP runtime of its own, beside the one that the core was linked with, and then the core's does not
know what ``torch.set_num_threads`` said. Without torch OpenMP's own settings hold.
"""

from __future__ import annotations

import sys
import threading

from ._library import binding

if sys.modules.get("torch") is not None:
    from torch import get_num_threads

    class _Told(threading.local):
        threads = 0
        """What the core knows of the calling thread; 0: nothing yet."""

    _told = _Told()

    def follow_torch() -> None:
        """Before each call of the core; takes 0.1 us."""
        threads = get_num_threads()
        if threads != _told.threads:
            binding.set_num_threads(threads)
            _told.threads = threads
else:

    def follow_torch() -> None:
        """torch is not there."""
