"""What happens to a job, as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.service import Service

LOOK = 0.2  # seconds between two looks for new events
# Seconds without an event after which clients, and proxies between, are shown that somebody is there.
QUIET = 15.0


async def events(service: Service, job: Job, seen: int) -> AsyncIterator[str]:
    """Server-sent events of a job behind the one that was ``seen``, until it ends."""
    last = time.monotonic()
    while True:
        ended = job.ended
        for event in job.events:
            number = round(1000 * event["at"])  # which a start of the server anew does not change
            if number > seen:
                seen, last = number, time.monotonic()
                yield f"id: {seen}\nevent: {event['event']}\ndata: {json.dumps(event)}\n\n"
        if ended or not service.ready:
            return
        if time.monotonic() - last >= QUIET:
            last = time.monotonic()
            yield ": waiting\n\n"
        await asyncio.sleep(LOOK)
