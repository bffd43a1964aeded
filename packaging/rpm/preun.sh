# Before the last version goes. An upgrade has stopped everything already, and runs again by now.
if [ "$1" -eq 0 ]; then
    if [ -d /run/systemd/system ]; then
        for timer in @TIMERS@; do
            systemctl disable --now "$timer" >/dev/null 2>&1 || true
            systemctl stop "${timer%.timer}.service" >/dev/null 2>&1 || true
        done
        systemctl disable --now sbxd.socket sbxd-admin.socket >/dev/null 2>&1 || true
        systemctl stop sbxd.service >/dev/null 2>&1 || true
        systemctl disable --now sbxd-launcher.socket >/dev/null 2>&1 || true
        systemctl stop sbxd-launcher.service >/dev/null 2>&1 || true
        # With the launcher gone nobody has a sandbox; what is left of one ends here.
        systemctl stop sbx.slice >/dev/null 2>&1 || true
    else
        systemctl disable sbxd.socket sbxd-admin.socket sbxd-launcher.socket @TIMERS@ \
            >/dev/null 2>&1 || true
    fi
    if aa-enabled --quiet 2>/dev/null; then
        for name in sbxd sbxd-launcher sbxd-workload; do
            apparmor_parser --remove "/etc/apparmor.d/$name" >/dev/null 2>&1 || true
        done
    fi
    find /usr/lib/sbxd/python -type d -name __pycache__ -prune -exec rm -rf {} +
fi
exit 0
