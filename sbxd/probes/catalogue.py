"""Every probe there is, for who drives them all.

The two of `hardening` are for hosts that have the layer, `Layer.APPARMOR` and `Layer.LANDLOCK`.
"""

from sbxd.probes import (
    files,
    hardening,
    kernel_surface,
    network,
    process,
    surroundings,
    system_calls,
)

PROBES = (
    *system_calls.PROBES,
    *kernel_surface.PROBES,
    *process.PROBES,
    *files.PROBES,
    *surroundings.PROBES,
    *network.PROBES,
    *hardening.PROBES,
)
