if [ -d /run/systemd/system ]; then
    systemctl daemon-reload >/dev/null 2>&1 || true
fi
if [ "$1" -eq 0 ]; then
    journalctl --update-catalog >/dev/null 2>&1 || true
    rm -f /run/sbxd-metrics/sbxd.prom
    rmdir /run/sbxd /run/sbxd-launcher /run/sbxd-metrics 2>/dev/null || true
fi
exit 0
