"""The programs that an agent's code stands on, each as one small run that says what it did.

A row is data: a shell script, and whether its output inside an environment is what it is without
one. A row that does not work names the rule that is the reason, and what is to be seen instead.
The scripts print nothing that differs from run to run.
"""

from dataclasses import dataclass

from tests.workloads.compiled import GCC, GO, JVM, MUSL, NODE


@dataclass(frozen=True)
class Row:
    """name, does: for the table. script: for `sh -c`, in an empty directory. says: for a row that
    works, what it prints, inside as outside. refused: why it does not work, and then `says` is
    what it prints inside and `outside` what it prints without a filter."""

    name: str
    does: str
    script: str
    says: str
    refused: str = ""
    outside: str = ""


def python(source: str) -> str:
    """A script that runs this program from a file, as spawned children need it."""
    return f"cat > program.py <<'END'\n{source.strip()}\nEND\nexec python3 program.py\n"


THREADS = python(
    """
import hashlib, queue, threading
jobs, results = queue.Queue(), []
lock, barrier = threading.Lock(), threading.Barrier(8)
def work():
    barrier.wait()
    while (job := jobs.get()) is not None:
        digest = hashlib.sha256(bytes(job)).hexdigest()
        with lock:
            results.append((job, digest[:4]))
for job in list(range(100)) + [None] * 8:
    jobs.put(job)
threads = [threading.Thread(target=work) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
print(len(results), sorted(results)[7])
"""
)
PROCESSES = python(
    """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
def square(x):
    return x * x
def fill(name, lock, done):
    block = shared_memory.SharedMemory(name)
    with lock:
        block.buf[0] += 1
    block.close()
    done.put("filled")
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        with context.Pool(2) as pool:
            total = sum(pool.map(square, range(50)))
        block = shared_memory.SharedMemory(create=True, size=4096)
        lock, done = context.Lock(), context.Queue()
        children = [context.Process(target=fill, args=(block.name, lock, done)) for _ in range(2)]
        [each.start() for each in children]
        words = [done.get() for _ in children]
        [each.join() for each in children]
        print(method, total, block.buf[0], words)
        block.close()
        block.unlink()
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(square, (3, 4))))
"""
)
SUBPROCESS = python(
    """
import os, signal, subprocess
print(subprocess.run(["sort"], input="b\\na\\n", text=True, capture_output=True).stdout.split())
print(subprocess.run("echo one | tr a-z A-Z", shell=True, capture_output=True).stdout)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
try:
    child.wait(0.05)
except subprocess.TimeoutExpired:
    os.killpg(child.pid, signal.SIGTERM)
print(child.wait(), subprocess.run(["false"], close_fds=False).returncode)
print(os.posix_spawn("/bin/true", ["true"], {}) > 0, os.wait()[1])
descriptor = os.pidfd_open(os.getpid())
print(descriptor > 2, os.sched_getaffinity(0) != set())
"""
)
ASYNCIO = python(
    """
import asyncio, ssl
async def serve(reader, writer):
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"over loopback\\n")
    print(await reader.readline())
    writer.close()
    local = await asyncio.start_unix_server(serve, "here.sock")
    reader, writer = await asyncio.open_unix_connection("here.sock")
    writer.write(b"over a unix socket\\n")
    print(await reader.readline())
    writer.close()
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    print(await child.communicate(b"through a child"))
    server.close(), local.close()
    print(ssl.create_default_context().check_hostname)
asyncio.run(main())
"""
)
SQLITE = python(
    """
import mmap, shutil, sqlite3, tempfile
with sqlite3.connect("base.db") as base:
    print(base.execute("pragma journal_mode=wal").fetchone())
    base.execute("create table t (a, b)")
    base.executemany("insert into t values (?, ?)", [(n, n * n) for n in range(1000)])
other = sqlite3.connect("base.db")
print(other.execute("select sum(b) from t where a % 2").fetchone())
shutil.copy("base.db", "copy.db")
with open("mapped", "w+b") as file:
    file.truncate(8192)
    with mmap.mmap(file.fileno(), 8192) as view:
        view[4096:4100] = b"here"
    file.seek(4096)
    print(file.read(4))
with tempfile.TemporaryFile() as file:
    print(file.write(b"x" * 100000))
"""
)
NUMPY = python(
    """
import numpy as np
generator = np.random.default_rng(7)
a = generator.random((300, 300))
product = a @ a.T
print(product.shape, bool(np.allclose(product, product.T)))
values = np.linalg.eigvalsh(product)
print(bool(values.min() > -1e-6), round(float(values.sum() - np.trace(product)), 6))
print(round(float(np.abs(np.fft.ifft(np.fft.fft(a[0])) - a[0]).max()), 6))
mapped = np.memmap("numbers", dtype="int64", mode="w+", shape=(1000,))
mapped[:] = np.arange(1000)
mapped.flush()
print(int(np.fromfile("numbers", dtype="int64").sum()))
"""
)
PANDAS = python(
    """
import pandas as pd
days = pd.date_range("2024-02-28", periods=5)
frame = pd.DataFrame({"k": list("abcab"), "v": range(5), "t": days})
frame.to_csv("frame.csv", index=False)
again = pd.read_csv("frame.csv", parse_dates=["t"])
print(again.equals(frame))
print(again.groupby("k")["v"].sum().to_dict())
print(again.set_index("t").resample("2D")["v"].mean().tolist())
print(again.merge(again, on="k").shape)
"""
)
PIP = """
mkdir made && python3 - <<'END'
import zipfile
with zipfile.ZipFile("made/tiny-1.0-py3-none-any.whl", "w") as wheel:
    about = "tiny-1.0.dist-info/"
    wheel.writestr("tiny.py", "def answer():\\n    return 42\\n")
    wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
    kind = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    wheel.writestr(about + "WHEEL", kind)
    wheel.writestr(about + "RECORD", "")
END
python3 -m pip install --quiet --no-index --find-links made --no-deps --target lib tiny || exit
PYTHONPATH=lib python3 -c 'import tiny; print(tiny.answer())'
"""
GIT = """
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
export GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'
git init -q -b main one && cd one || exit
for n in 1 2 3 4 5; do echo line $n >> file; git add file; git commit -q -m "commit $n"; done
git checkout -q -b side HEAD~2 && echo other > other && git add other && git commit -q -m side
git checkout -q main && git merge -q -m merged side || exit
git gc -q --aggressive && git fsck --no-progress --strict || exit
cd .. && git clone -q one two 2>/dev/null && cd two || exit
git log --format=%s --topo-order && git status --short
git worktree add -q ../three HEAD~1 && ls ../three && git grep -c line && git stash list
"""
SHELL = """
mkdir -p tree/a tree/b && seq 1 2000 > tree/a/numbers
cp --sparse=always tree/a/numbers tree/b/
sort -R tree/a/numbers | sort -n --parallel=2 | cmp - tree/b/numbers && echo sorted
tar czf tree.tgz tree && rm -r tree && tar xzf tree.tgz
cmp tree/a/numbers tree/b/numbers && echo same
find tree -type f -print0 | xargs -0 -P 4 -n 1 wc -l | cut -d' ' -f1
truncate -s 1M holes && dd if=holes of=filled bs=64k conv=notrunc status=none
stat -c %s filled; yes | head -c 1000000 | cat | tail -c 2
ln tree/a/numbers hard && ln -s hard soft && readlink -f soft
(flock 9; echo locked) 9> lock; mkfifo pipe; (echo through > pipe &) ; cat pipe
nproc > /dev/null && timeout 0.05 sleep 60; echo $?
ulimit -n > /dev/null && nice -n 5 echo nice; df . > /dev/null
chmod 640 hard && stat -c %a hard; touch -d 2024-01-01T00:00:00Z hard && stat -c %Y hard
"""

UDP = python(
    """
import socket
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    print("made")
except OSError as problem:
    print(problem.strerror)
"""
)
PTY = python(
    """
import os
try:
    os.openpty()
    print("made")
except OSError as problem:
    print(problem.strerror)
"""
)
NAMESPACES = "unshare --mount true 2>&1 && echo made"
TRACE = python(
    """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    os._exit(0 if libc.ptrace(0, 0, 0, 0) == 0 else ctypes.get_errno())
print(os.strerror(os.waitstatus_to_exitcode(os.wait()[1])))
"""
)
ROWS = (
    Row(
        "CPython, threads",
        "eight threads with a queue, a lock and a barrier",
        THREADS,
        "100 (7, '8378')\n",
    ),
    Row(
        "CPython, multiprocessing",
        "pools, locks, queues and shared memory by fork, spawn and forkserver",
        PROCESSES,
        "".join(f"{m} 40425 2 ['filled', 'filled']\n" for m in ("fork", "spawn", "forkserver"))
        + "[9, 16]\n",
    ),
    Row(
        "CPython, subprocess",
        "pipes, a shell, a timeout, process groups, posix_spawn, pidfd",
        SUBPROCESS,
        "['a', 'b']\nb'ONE\\n'\n-15 1\nTrue 0\nTrue True\n",
    ),
    Row(
        "CPython, asyncio",
        "servers on loopback and on a Unix socket, a child process",
        ASYNCIO,
        "b'OVER LOOPBACK\\n'\nb'OVER A UNIX SOCKET\\n'\n(b'through a child', None)\nTrue\n",
    ),
    Row(
        "CPython, sqlite3 and mmap",
        "a write-ahead log, a second connection, a mapped file",
        SQLITE,
        "('wal',)\n(166666500,)\nb'here'\n100000\n",
    ),
    Row(
        "numpy",
        "products, eigenvalues, a Fourier transform, a mapped array",
        NUMPY,
        "(300, 300) True\nTrue 0.0\n0.0\n499500\n",
    ),
    Row(
        "pandas",
        "CSV and back, grouping, resampling, a join",
        PANDAS,
        "True\n{'a': 3, 'b': 5, 'c': 2}\n[0.5, 2.5, 4.0]\n(9, 5)\n",
    ),
    Row("pip", "installs a wheel from a folder", PIP, "42\n"),
    Row(
        "git",
        "commits, a merge, gc, fsck, a clone, a worktree",
        GIT,
        "merged\nside\ncommit 5\ncommit 4\ncommit 3\ncommit 2\ncommit 1\nfile\nfile:5\n",
    ),
    Row(
        "gcc",
        "compiles and runs a program with threads and children; a shared library",
        GCC,
        "from a child\n4000 0\n3\n42\n",
    ),
    Row(
        "musl",
        "compiles, and runs threads and children, dynamically linked and statically",
        MUSL,
        2 * "from a child\nthrough a pipe\n8 0 0\n",
    ),
    Row(
        "Java",
        "compiles; a pool of threads, a virtual thread, a child, files, TCP on loopback, the JIT",
        JVM,
        "79999200000\nfrom a thread\nfrom a child\n0 832040\ntext 4\nover loopback\n",
    ),
    Row(
        "node",
        "files, a worker thread, a child, crypto, HTTP on loopback, the JIT",
        NODE,
        "a,c,program.js text\nfrom a thread\nfrom a child\n2d711642\npacked\n16 87c5081bda438d49\n"
        "over loopback\n999718\n0\n",
    ),
    Row(
        "go",
        "vets, builds and runs a program with goroutines, a child, TCP on loopback, file copies",
        GO,
        '328350\nfrom a child\n<nil>\n["module" "app"] <nil>\ntrue <nil>\n0\n',
    ),
    Row(
        "shell and coreutils",
        "sort, tar, find, xargs, dd, flock, FIFOs, links",
        SHELL,
        "sorted\nsame\n2000\n2000\n1048576\ny\n/workspace/hard\nlocked\nthrough\n124\nnice\n"
        "640\n1704067200\n",
    ),
    Row(
        "UDP",
        "makes a datagram socket",
        UDP,
        "Protocol not supported\n",
        "nothing leaves by UDP, and names are resolved outside",
        "made\n",
    ),
    Row(
        "pseudo-terminals",
        "opens a terminal pair",
        PTY,
        "No such file or directory\n",
        "there is no terminal and no device that makes one",
        "made\n",
    ),
    Row(
        "namespaces",
        "a sandbox of its own (browsers, bubblewrap)",
        NAMESPACES,
        "unshare: unshare failed: Operation not permitted\n",
        "namespaces open the kernel's least tested paths",
        "made\n",
    ),
    Row(
        "debuggers",
        "ptrace (gdb, strace)",
        TRACE,
        "Operation not permitted\n",
        "looking into another process is refused, whoever owns it",
        "Success\n",
    ),
)
