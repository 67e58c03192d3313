"""How many cores there are to share."""

import os


def num_cores() -> int:
    """Cores that this process may use: of a container or under taskset fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
