"""How much processor time was used."""

import time


def cpu_seconds() -> float:
    """Return the processor time of this process and of its finished workers.

    On Windows, which has no `resource`, that of this process alone.
    """
    try:
        import resource
    except ImportError:
        return time.process_time()
    usages = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
