"""What the suite asks an environment to do, as argument vectors.

`RealCommands` are scripts for an image that has python3 and a shell. `ScriptedCommands` are verbs
that the fake's script answers. The suite sees only the protocol.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from sbxd.fake.script import Answer, Invocation, Outcome, Script

Argv = tuple[str, ...]
EXAMPLES = Path(__file__).parents[2] / "examples"


class Commands(Protocol):
    """One argument vector per behaviour. Names may hold bytes that are not UTF-8, as
    surrogateescape."""

    def write(self, *, stdout: str = "", stderr: str = "", exit_code: int = 0) -> Argv: ...

    def write_bytes(self, count: int, *, stream: str = "stdout") -> Argv: ...

    def write_then_sleep(self, text: str, seconds: float) -> Argv: ...

    def die_of(self, signal: int) -> Argv: ...

    def write_file(self, path: str, content: str) -> Argv: ...

    def write_files(self, count: int) -> Argv: ...

    def change_files(self, *, create: str, modify: str, delete: str) -> Argv: ...

    def read_file(self, path: str) -> Argv: ...

    def echo_stdin(self) -> Argv: ...

    def count_stdin(self) -> Argv: ...

    def print_arguments(self, *arguments: str) -> Argv: ...

    def print_environment(self) -> Argv: ...

    def print_directory(self) -> Argv: ...

    def call_bridge(self, *frames: str) -> Argv:
        """Call with each frame, then write the answers; without a bridge, exit with 1."""
        ...


class RealCommands:
    """python3 of the image, and its shell."""

    def _python(self, code: str, *arguments: str) -> Argv:
        return ("python3", "-c", f"import os, sys, time, signal\n{code}", *arguments)

    def write(self, *, stdout: str = "", stderr: str = "", exit_code: int = 0) -> Argv:
        return self._python(
            "sys.stdout.write(sys.argv[1]); sys.stderr.write(sys.argv[2])\n"
            "sys.exit(int(sys.argv[3]))",
            stdout,
            stderr,
            str(exit_code),
        )

    def write_bytes(self, count: int, *, stream: str = "stdout") -> Argv:
        number = {"stdout": 1, "stderr": 2}[stream]
        return self._python(
            "left = int(sys.argv[1])\n"
            "while left:\n"
            f"    left -= os.write({number}, b'x' * min(left, 65536))",
            str(count),
        )

    def write_then_sleep(self, text: str, seconds: float) -> Argv:
        # Not by an interpreter, whose start may take longer than the timeouts of the tests.
        return ("sh", "-c", 'printf %s "$1" && exec sleep "$2"', "sh", text, str(seconds))

    def die_of(self, signal: int) -> Argv:
        return self._python("os.kill(os.getpid(), int(sys.argv[1]))", str(signal))

    def write_file(self, path: str, content: str) -> Argv:
        return self._python(
            "os.makedirs(os.path.dirname(os.path.abspath(sys.argv[1])), exist_ok=True)\n"
            "open(sys.argv[1], 'w').write(sys.argv[2])",
            path,
            content,
        )

    def write_files(self, count: int) -> Argv:
        return self._python(
            "[open(f'file-{n:05}', 'w').close() for n in range(int(sys.argv[1]))]", str(count)
        )

    def change_files(self, *, create: str, modify: str, delete: str) -> Argv:
        return self._python(
            "open(sys.argv[1], 'w').write('created')\n"
            "open(sys.argv[2], 'a').write('-modified')\n"
            "os.unlink(sys.argv[3])",
            create,
            modify,
            delete,
        )

    def read_file(self, path: str) -> Argv:
        return self._python("sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", path)

    def echo_stdin(self) -> Argv:
        return self._python("sys.stdout.buffer.write(sys.stdin.buffer.read())")

    def count_stdin(self) -> Argv:
        return self._python("print(len(sys.stdin.buffer.read()), end='')")

    def print_arguments(self, *arguments: str) -> Argv:
        return self._python(
            "sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))", *arguments
        )

    def print_environment(self) -> Argv:
        # Not through a shell or an interpreter, which adds names of its own.
        return ("env", "-0")

    def print_directory(self) -> Argv:
        return self._python("print(os.getcwd(), end='')")

    def call_bridge(self, *frames: str) -> Argv:
        client = (EXAMPLES / "bridge_client.py").read_text().partition("if __name__")[0]
        return self._python(
            f"{client}\n"
            "try:\n"
            "    bridge = Bridge()\n"
            "except OSError as problem:\n"
            "    sys.exit(f'{problem}')\n"
            "answers = [bridge.call(word.encode()) for word in sys.argv[1:]]\n"
            "sys.stdout.buffer.write(b''.join(answers))",
            *frames,
        )


class ScriptedCommands:
    """Verbs, and the script that answers them."""

    def script(self) -> Script:
        answers: Mapping[str, Answer] = {
            name: getattr(self, f"_answer_{name}")
            for name in (
                "write",
                "write_bytes",
                "write_then_sleep",
                "die_of",
                "write_file",
                "write_files",
                "change_files",
                "read_file",
                "echo_stdin",
                "count_stdin",
                "print_arguments",
                "print_environment",
                "print_directory",
                "call_bridge",
            )
        }
        return Script(by_program=answers)

    def write(self, *, stdout: str = "", stderr: str = "", exit_code: int = 0) -> Argv:
        return ("write", stdout, stderr, str(exit_code))

    def _answer_write(self, call: Invocation) -> Outcome:
        return Outcome(
            stdout=_raw(call.argv[1]), stderr=_raw(call.argv[2]), exit_code=int(call.argv[3])
        )

    def write_bytes(self, count: int, *, stream: str = "stdout") -> Argv:
        return ("write_bytes", str(count), stream)

    def _answer_write_bytes(self, call: Invocation) -> Outcome:
        data = b"x" * int(call.argv[1])
        return Outcome(stdout=data) if call.argv[2] == "stdout" else Outcome(stderr=data)

    def write_then_sleep(self, text: str, seconds: float) -> Argv:
        return ("write_then_sleep", text, str(seconds))

    def _answer_write_then_sleep(self, call: Invocation) -> Outcome:
        return Outcome(stdout=_raw(call.argv[1]), sleep_seconds=float(call.argv[2]))

    def die_of(self, signal: int) -> Argv:
        return ("die_of", str(signal))

    def _answer_die_of(self, call: Invocation) -> Outcome:
        return Outcome(signal=int(call.argv[1]))

    def write_file(self, path: str, content: str) -> Argv:
        return ("write_file", path, content)

    def _answer_write_file(self, call: Invocation) -> Outcome:
        return Outcome(writes={_relative(call, call.argv[1]): _raw(call.argv[2])})

    def write_files(self, count: int) -> Argv:
        return ("write_files", str(count))

    def _answer_write_files(self, call: Invocation) -> Outcome:
        return Outcome(writes={f"file-{n:05}": b"" for n in range(int(call.argv[1]))})

    def change_files(self, *, create: str, modify: str, delete: str) -> Argv:
        return ("change_files", create, modify, delete)

    def _answer_change_files(self, call: Invocation) -> Outcome:
        _, create, modify, delete = call.argv
        return Outcome(
            writes={create: b"created", modify: call.files[modify] + b"-modified"},
            deletes=(delete,),
        )

    def read_file(self, path: str) -> Argv:
        return ("read_file", path)

    def _answer_read_file(self, call: Invocation) -> Outcome:
        return Outcome(stdout=call.files[_relative(call, call.argv[1])])

    def echo_stdin(self) -> Argv:
        return ("echo_stdin",)

    def _answer_echo_stdin(self, call: Invocation) -> Outcome:
        return Outcome(stdout=call.stdin)

    def count_stdin(self) -> Argv:
        return ("count_stdin",)

    def _answer_count_stdin(self, call: Invocation) -> Outcome:
        return Outcome(stdout=str(len(call.stdin)).encode())

    def print_arguments(self, *arguments: str) -> Argv:
        return ("print_arguments", *arguments)

    def _answer_print_arguments(self, call: Invocation) -> Outcome:
        return Outcome(stdout=b"\0".join(map(_raw, call.argv[1:])))

    def print_environment(self) -> Argv:
        return ("print_environment",)

    def _answer_print_environment(self, call: Invocation) -> Outcome:
        pairs = (f"{name}={value}\0" for name, value in call.environment.items())
        return Outcome(stdout=_raw("".join(pairs)))

    def call_bridge(self, *frames: str) -> Argv:
        return ("call_bridge", *frames)

    def _answer_call_bridge(self, call: Invocation) -> Outcome:
        return Outcome(bridge=tuple(frame.encode() for frame in call.argv[1:]))

    def print_directory(self) -> Argv:
        return ("print_directory",)

    def _answer_print_directory(self, call: Invocation) -> Outcome:
        return Outcome(stdout=_raw(call.working_directory))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _relative(call: Invocation, path: str) -> str:
    return f"{call.working_directory}/{path}".removeprefix("/workspace").lstrip("/")
