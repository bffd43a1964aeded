# What both packages' scripts do once the files are there. Put into each in place of @INSTALLED@.
credential() {
    file=/etc/sbxd/service-credential
    if [ -e "$file" ] || [ -L "$file" ]; then
        return
    fi
    # Whole under its name or not there; `ln` never replaces one that is.
    new=$(umask 077 && mktemp /etc/sbxd/.service-credential.XXXXXXXX)
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$new"
    if [ "$(stat -c %s "$new")" = 64 ]; then
        ln "$new" "$file" || true
    fi
    rm -f "$new"
    [ -s "$file" ] || { echo "sbxd: the service credential could not be made" >&2; exit 1; }
}

bytecode() {
    # The interpreter as the commands start it, whatever this environment says. The services
    # cannot write here, and would compile everything at each start.
    /usr/bin/python3 -IS -m compileall -q /usr/lib/sbxd/python
}

profiles() {
    # A kernel without AppArmor has nothing to load into; with it, no sandbox is built until the
    # profile of its commands is loaded, and `sbxctl doctor` says so.
    if aa-enabled --quiet 2>/dev/null; then
        for name in sbxd sbxd-launcher sbxd-workload; do
            LC_ALL=C.UTF-8 apparmor_parser --replace --write-cache "/etc/apparmor.d/$name" ||
                echo "sbxd: the AppArmor profile $name could not be loaded" >&2
        done
    fi
}
