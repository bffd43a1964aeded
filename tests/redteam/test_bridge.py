import secrets
from pathlib import Path
import pytest
from tests.redteam.live import fresh_bridge, live

CLIENT = Path(__file__).parents[2] / "examples" / "bridge_client.py"
pytestmark = [pytest.mark.needs("daemon")]

async def test_calls() -> None:
    seen: list[bytes] = []

    async def handler(frame: bytes) -> bytes:
        seen.append(frame)
        return frame.upper()

    async with live(bridge=fresh_bridge()) as sandbox:
        await sandbox.workspace.write("bridge_client.py", CLIENT.read_bytes())
        result = await sandbox.with_bridge(handler).run("python3", "bridge_client.py", "one", "two")
        assert result.exit_code == 0, result
        assert result.stdout == b"ONE\nTWO\n"
        assert seen == [b"one", b"two"]
