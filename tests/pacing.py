"""The pause between two looks at what tells nobody of its changes: the kernel, systemd, a file,
what another process answers.

A loop of looks has a deadline (`trio.fail_after`), and ends as soon as it has seen what it waits
for; the pause leaves the processors to what is waited for. It is no time that something is given:
whoever would need that waits for an event.
"""

import trio

LOOK_SECONDS = 0.01


async def next_look() -> None:
    """Until the next look is due."""
    with trio.move_on_after(LOOK_SECONDS):
        await trio.sleep_forever()
