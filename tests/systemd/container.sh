# shellcheck shell=bash disable=SC2154 # here, work and root are run.sh's
# A Debian with a real systemd as its PID 1, in systemd-nspawn: made, booted, rebooted and removed by these functions.
#
# Needs neither a systemd nor a D-Bus on the host. State: $work (a folder of this run), $root (the container's files).

suite=bookworm
packages=systemd,systemd-sysv,dbus,libpam-systemd,procps,iproute2

# The base system, made once and kept: minutes the first time, seconds after that.
container_base() { # CACHE → prints its folder
    local cache=$1 base partial
    base="$cache/base-$suite-$(printf %s "$packages" | sha256sum | cut -c1-12)"
    if [ ! -d "$base" ]; then
        echo "making the base system in $base (minutes, once)" >&2
        partial="$base.partial.$$"
        rm -rf "$partial"
        mkdir -p "$cache"
        if ! debootstrap --variant=minbase --include="$packages" "$suite" "$partial" >"$cache/debootstrap.log" 2>&1; then
            rm -rf "$partial"
            echo "debootstrap failed; its last lines (all of them: $cache/debootstrap.log):" >&2
            tail -n 5 "$cache/debootstrap.log" >&2
            return 1
        fi
        rm -f "$partial"/var/cache/apt/archives/*.deb
        mv "$partial" "$base"
    fi
    echo "$base"
}

# Runs the container until it powers off; a reboot ends nspawn with 133, and it is started again. Runs in a mount
# namespace of its own, with a tmpfs on /run: with /run on a disk nspawn fails when the guest reboots.
container_loop() { # ROOT PIDFILE
    local code
    mount -t tmpfs -o mode=755 tmpfs /run
    while :; do
        systemd-nspawn -q -D "$1" --boot --machine="bcd-test-$$" --private-network --register=no --keep-unit \
            --console=pipe --system-call-filter=bpf </dev/null &
        echo $! >"$2"
        code=0
        wait $! || code=$?
        [ "$code" = 133 ] || return "$code"
    done
}

container_boot() {
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 setsid unshare -m --propagation private \
        bash "$here/run.sh" --container-loop "$root" "$work/nspawn.pid" >"$work/console.log" 2>&1 &
    loop=$!
    container_up
}

# PID 1 of the container, seen from here.
leader() {
    local nspawn
    nspawn=$(cat "$work/nspawn.pid" 2>/dev/null) && pgrep -P "$nspawn" -o
}

# Waits until systemd has started what it starts, and has a loopback.
container_up() {
    within 60 "the container is up" is_up || return 1
    inside ip link set lo up
}

is_up() {
    local state
    state=$(inside systemctl is-system-running 2>/dev/null)
    [ "$state" = running ] || [ "$state" = degraded ]
}

# Runs a program in the container; neither its environment nor its standard input is ours. Only for what ends before
# the container does: systemd's shutdown stops every process for a moment, nsenter then stops itself out here, where
# nobody wakes it, and the container cannot end. What shall run on is started with `inside systemd-run`.
inside() {
    local pid
    pid=$(leader) || return 1
    nsenter -t "$pid" -a env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@" </dev/null
}

container_reboot() {
    local before
    before=$(leader)
    inside systemctl reboot
    within 60 "the container has gone down" gone "$before"
    container_up
}

gone() { ! kill -0 "$1" 2>/dev/null; }

container_end() {
    local nspawn pid
    nspawn=$(cat "$work/nspawn.pid" 2>/dev/null) || return 0
    pid=$(leader) || true
    kill "$nspawn" 2>/dev/null || true # an orderly power-off
    for _ in $(seq 100); do
        kill -0 "$nspawn" 2>/dev/null || break
        sleep 0.1
    done
    [ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true
    wait "$loop" 2>/dev/null || true
}
