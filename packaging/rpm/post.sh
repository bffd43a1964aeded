# May be run any number of times.
set -e

@INSTALLED@

systemd-sysusers sbxd.conf
systemd-tmpfiles --create sbxd.conf
credential
# What an earlier version compiled, and this one has not, would be left when it goes.
find /usr/lib/sbxd/python -type d -name __pycache__ -prune -exec rm -rf {} +
bytecode
journalctl --update-catalog >/dev/null 2>&1 || true
profiles
# Whether a new service is enabled is the distribution's preset, and then the administrator's word.
if [ "$1" -eq 1 ]; then
    systemctl --no-reload preset sbxd.socket sbxd-admin.socket sbxd-launcher.socket @TIMERS@ \
        >/dev/null 2>&1 || true
fi
exit 0
