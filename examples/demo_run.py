"""The demo itself, on a machine or in a lane where sbxd runs: everything goes through sbxctl.

Exits non-zero when anything is not as it says.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMITS = ["--memory", "128M", "--pids", "64", "--cpus", "1", "--disk", "64M", "--inodes", "1000"]
HOG = """
blocks = []
while True:
    blocks.append(bytearray(2**23))
    print(len(blocks) * 8, "MiB", flush=True)
"""


def sbxctl(*arguments: str) -> tuple[int, str]:
    """Run sbxctl; its report for people goes to the terminal, its stdout comes back."""
    done = subprocess.run(["sbxctl", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    """`sbxctl run --json` and its document."""
    code, out = sbxctl("run", "--json", *LIMITS, *arguments)
    return code, json.loads(out)


def expect(holds: bool, what: str) -> None:
    """Stop the demo, with the reason, when something is not as it should be."""
    if not holds:
        sys.exit(f"demo: {what}")


def analysis() -> None:
    """A model's script over 12,000 rows, with its limits enforced and its files reported."""
    print("\n1. A script that a model wrote summarises 12,000 sales")
    files = [
        "--put",
        f"{HERE}/sales.csv:sales.csv",
        "--put",
        f"{HERE}/summarise_sales.py:summarise.py",
    ]
    code, document = run_json(*files, "--", "python3", "summarise.py")
    result, timings = document["result"], document["timings"]
    expect(code == 0, f"the analysis ended with {result}")
    print(result["stdout"]["text"], end="")
    print(f"\n   changed files ({len(result['files_changed'])}):")
    for change in result["files_changed"]:
        digest = change["sha256"] or "-"
        print(
            f"   {change['change'].lower():9} {change['path']:22} {change['size_bytes']:7} {digest}"
        )
    changed = {change["path"] for change in result["files_changed"]}
    expect("summary.csv" in changed and "monthly/2025-12.csv" in changed, "files are missing")
    expect(not result["unenforced_limits"], f"not enforced here: {result['unenforced_limits']}")
    usage = result["usage"]
    print(
        f"\n   exit code {result['exit_code']} in {result['duration_ms']} ms; "
        f"cpu {usage['cpu_ms']} ms, memory peak {usage['memory_peak_bytes']} bytes, "
        f"pids peak {usage['pids_peak']}"
    )
    print(
        f"   environment ready after {timings['provision_ms']} ms; first byte of output "
        f"{timings['first_byte_after_execute_ms']} ms after the command was sent"
    )


def hello() -> None:
    """From the request for an environment to the first byte of output."""
    code, document = run_json("--", "echo", "hello from the sandbox")
    expect(code == 0, f"echo ended with {document['result']}")
    print("\n2. From nothing to the first byte of a small command")
    print(f"   provision to first byte: {document['timings']['first_byte_ms']} ms")


def hog() -> None:
    """A memory hog is ended by the kernel, and says how far it came."""
    print("\n3. A memory hog under 128 MiB")
    code, document = run_json("--", "python3", "-c", HOG)
    result = document["result"]
    last = result["stdout"]["text"].splitlines()[-1:]
    print(f"   killed_by {result['killed_by']}, evidence {result['evidence']}, last line {last}")
    expect(result["killed_by"] == "MEMORY" and code == 231, "the hog was not ended with MEMORY")


def sleeper() -> None:
    """A sleeper with a daemon that ignores signals is ended at its deadline, with its daemon."""
    print("\n4. A sleeper that hides behind setsid")
    script = "(setsid sh -c 'trap \"\" TERM HUP; sleep 600' &) ; echo asleep; sleep 600"
    code, document = run_json("--timeout", "2", "--", "sh", "-c", script)
    result = document["result"]
    print(f"   killed_by {result['killed_by']} after {result['duration_ms']} ms")
    expect(result["killed_by"] == "TIMEOUT" and code == 230, "the sleeper did not time out")


def main() -> None:
    """Run the parts, then show that nothing is left."""
    analysis()
    hello()
    hog()
    sleeper()
    code, out = sbxctl("ls", "--json")
    expect(code == 0 and json.loads(out) == [], "an environment is left over")
    print("\n5. Nothing is left: `sbxctl ls` lists no environment")


if __name__ == "__main__":
    main()
