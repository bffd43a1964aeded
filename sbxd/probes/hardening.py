"""Probes of the layers that not every host has: AppArmor's label and Landlock's domain.

A host without the layer fails them: who drives them asks first whether it is there.
"""

from sbxd.probes.probe import Layer, Probe

PROFILE = "sbxd-workload"
LABEL = f"{PROFILE} (enforce)"

_FILES = ("current", "exec", "apparmor/current", "apparmor/exec")
_WORDS = (
    "exec unconfined",
    "changeprofile unconfined",
    "exec sbxd-launcher",
    "stack sbxd",
    f"exec {PROFILE}",
)
_WRITES = {
    f"{of} {name} {word}": (f"/proc/{of}/attr/{name}", word)
    for of in ("self", "thread-self", "1")
    for name in _FILES
    for word in _WORDS
}

APPARMOR = Probe(
    id="apparmor",
    cases=("ESC-20",),
    layer=Layer.APPARMOR,
    source=f"WRITES = {_WRITES!r}"
    + """
def write(path, word):
    with open(path, "wb", buffering=0) as file:
        file.write(word.encode())

found = {name: attempt(write, *words) for name, words in WRITES.items()
         if ONLY is None or name in ONLY}
with open("/proc/self/attr/current") as file:
    found["label"] = file.read().strip("\\0\\n")
answer({**found, "/dev/null": attempt(write, "/dev/null", "exec")})
""",
    inside={
        # Init is not visible.
        **{name: frozenset({"ENOENT" if name.startswith("1 ") else "EACCES"}) for name in _WRITES},
        "label": frozenset({LABEL}),
    },
    controls={"/dev/null": "ok"},
    outside={f"self apparmor/exec exec {PROFILE}": "ok"},
)

# A thread can take on sixteen rulesets: how many it gets tells how many it had.
LANDLOCK = Probe(
    id="landlock",
    cases=(),
    layer=Layer.LANDLOCK,
    source="""
import struct
# Looked at in both places: ONLY changes nothing.
attributes = struct.pack("QQQ", 1 << 12, 0, 0)
libc.prctl(38, 1, 0, 0, 0)
libc.syscall.restype = ctypes.c_long
ruleset = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
taken = 0
while libc.syscall(446, ctypes.c_long(ruleset), ctypes.c_uint(0)) == 0:
    taken += 1
answer({"taken": str(taken), "a ruleset": "ok" if ruleset >= 0 else "ENOSYS"})
""",
    inside={"taken": frozenset({"15"})},
    controls={"a ruleset": "ok"},
    outside={"taken": "16"},
)

PROBES = (APPARMOR, LANDLOCK)
