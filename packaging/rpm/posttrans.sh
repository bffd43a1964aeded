# Once everything is in its place: what is enabled listens (again).
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || true
    for unit in sbxd-launcher.socket sbxd-admin.socket sbxd.socket @TIMERS@; do
        if systemctl --quiet is-enabled "$unit" 2>/dev/null; then
            systemctl start "$unit" >/dev/null 2>&1 || true
        fi
    done
fi
exit 0
