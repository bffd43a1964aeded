"""Whole programs that agents are asked to run, each as one small run that says what it did.

A program is data: a shell script and what it prints. The first have no network; the clients reach
HOST through the proxy by the variables that every environment has.
"""

from dataclasses import dataclass

from tests.workloads.rows import python


@dataclass(frozen=True)
class Program:
    """name, does: for the table. script: for `sh -c`, in an empty directory. says: its output."""

    name: str
    does: str
    script: str
    says: str


POSTGRES = """
set -e
PATH=$PATH:/usr/lib/postgresql/17/bin
initdb --pgdata data --auth trust --no-sync >log 2>&1 || { cat log; exit 1; }
pg_ctl --pgdata data --wait --log server.log -o "-k $PWD -c listen_addresses=" start >/dev/null
psql --host "$PWD" --no-align --tuples-only --dbname postgres --command \\
  'create table t as select x from generate_series(1, 100) x; select sum(x), current_user from t'
pg_ctl --pgdata data --wait --mode fast stop >/dev/null
"""
CHROMIUM = """
set -e
cat > page.html <<'END'
<html><body><p id="place">before</p>
<script>document.getElementById("place").textContent = "after " + 6 * 7</script></body></html>
END
run() {
    chromium --headless --no-sandbox --disable-gpu --user-data-dir=/tmp/profile "$@" \\
        "file://$PWD/page.html" 2>>log || { cat log; exit 1; }
}
run --dump-dom | grep -o '>after [0-9]*'
run --screenshot="$PWD/page.png" --window-size=200,100 >/dev/null
head -c 8 page.png | od -An -c | tr -d ' '
"""
JUPYTER = python(
    """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3", startup_timeout=240)
client.execute_interactive("x = 6 * 7", timeout=240)
client.execute_interactive("print('the kernel keeps', x)", timeout=240)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
)
INTERFACES = python(
    """
import psutil, socket
print(sorted(psutil.net_if_addrs()), [name for _, name in socket.if_nameindex()])
"""
)
NODE_INTERFACES = (
    "node -e 'console.log(Object.keys(os.networkInterfaces()), os.userInfo().username)'"
)
PROGRAMS = (
    Program(
        "PostgreSQL",
        "initdb, a server on a Unix socket, a query",
        POSTGRES,
        "SELECT 100\n5050|sandbox\n",
    ),
    Program(
        "Chromium",
        "headless, a page with a script, a screenshot",
        CHROMIUM,
        ">after 42\n211PNG\\r\\n032\\n\n",
    ),
    Program(
        "Jupyter", "starts a kernel and runs two cells in it", JUPYTER, "the kernel keeps 42\n"
    ),
    Program("psutil", "lists the network interfaces", INTERFACES, "['lo'] ['lo']\n"),
    Program(
        "node, interfaces",
        "os.networkInterfaces, os.userInfo",
        NODE_INTERFACES,
        "[ 'lo' ] sandbox\n",
    ),
)
CLIENTS = (
    Program(
        "node, fetch",
        "node 22.21 or later",
        "NODE_EXTRA_CA_CERTS=ca.pem node -e "
        '\'fetch("https://HOST/files/greeting.txt").then(r => r.text())'
        ".then(t => process.stdout.write(t))'",
        "hello from the other side\n",
    ),
    Program(
        "aiohttp",
        "with trust_env=True",
        python(
            """
import aiohttp, asyncio, ssl
async def main():
    context = ssl.create_default_context(cafile="ca.pem")
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get("https://HOST/files/greeting.txt", ssl=context) as answer:
            print(await answer.text(), end="")
asyncio.run(main())
"""
        ),
        "hello from the other side\n",
    ),
)
