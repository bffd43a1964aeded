# Before the files of a newer version are laid: nothing of sbxd runs, so that no connection starts
# half of an old version and half of a new one. The daemon ends what sandboxes there are.
if [ "$1" -ge 2 ] && [ -d /run/systemd/system ]; then
    for timer in @TIMERS@; do
        systemctl stop "$timer" "${timer%.timer}.service" >/dev/null 2>&1 || true
    done
    systemctl stop sbxd.socket sbxd-admin.socket sbxd.service >/dev/null 2>&1 || true
    systemctl stop sbxd-launcher.socket sbxd-launcher.service >/dev/null 2>&1 || true
    systemctl stop sbx.slice >/dev/null 2>&1 || true
fi
exit 0
