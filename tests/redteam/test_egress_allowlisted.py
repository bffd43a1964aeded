"""With an allowlist, what it lists is reached and nothing else is, and the audit says why."""

from collections.abc import Iterator

import pytest

from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import allowlist, configured, networked

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.egress_allowlisted"),
]
FETCH = """
context = ssl.create_default_context(cafile="ca.pem")
code, body, s = head(ask("files.lab-allowed.com:443"))
assert code == 200, body
s = context.wrap_socket(s, server_hostname="files.lab-allowed.com")
s.sendall(b"GET /files/greeting.txt HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
data = b""
while piece := s.recv(4096):
    data += piece
print(data.partition(b"\\r\\n\\r\\n")[2].decode())
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


async def test_a_listed_destination_is_reached_and_recorded(internet: Internet) -> None:
    async with networked() as one:
        await one.workspace.write("ca.pem", internet.ca)
        result = await one.ask(FETCH)
        assert result.stdout == b"hello from the other side\n\n", result
        allowed, closed = one.egress()
        assert allowed["SBX_EVENT"] == "EgressAllowed"
        assert allowed["SBX_HOST"] == "files.lab-allowed.com"
        assert allowed["SBX_PORT"] == "443"
        assert allowed["SBX_ADDRESS"] == lab.ALLOWED
        assert allowed["SBX_RUN_ID"] == one.handle.run_id
        assert allowed["SBX_TENANT_ID"] == one.handle.tenant_id
        assert allowed["SBX_COMMAND_NUMBER"] == "1"
        assert closed["SBX_EVENT"] == "EgressTunnelClosed"
        assert int(closed["SBX_DOWN_BYTES"]) > 100
