if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || true
fi
if [ "$1" -eq 0 ]; then
    journalctl --update-catalog >/dev/null 2>&1 || true
    unlink /run/sbxd-metrics/sbxd.prom 2>/dev/null || true
    rmdir /run/sbxd /run/sbxd-launcher /run/sbxd-metrics 2>/dev/null || true
fi
exit 0
