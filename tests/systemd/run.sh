#!/usr/bin/env bash
# The package and the unit under a real systemd: installed, joined, restarted, killed, hung, rebooted, purged.
#
# `make test-systemd` builds the package and calls this; it prints a line a check. Needs root.
#   run.sh PACKAGE.deb      BCD_SYSTEMD_CACHE: where the base system is kept (target/systemd)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/systemd/container.sh
. "$here/container.sh"

if [ "${1:-}" = --container-loop ]; then
    container_loop "$2" "$3"
    exit
fi

die() {
    echo "make test-systemd: $*" >&2
    exit 1
}

need() { # PROGRAM PACKAGE
    command -v "$1" >/dev/null || die "$1 is missing; on Debian: apt-get install -y $2"
}

[ "$(id -u)" = 0 ] || die "a container is started, so it needs root: sudo make test-systemd"
need systemd-nspawn systemd-container
need debootstrap debootstrap
need nsenter util-linux
need pgrep procps

deb=${1:?the package to test}
[ -f "$deb" ] || die "there is no package $deb; make one: make target/systemd/bcd.deb"
cache=$(mkdir -p "${BCD_SYSTEMD_CACHE:-$here/../../target/systemd}" && cd "${BCD_SYSTEMD_CACHE:-$here/../../target/systemd}" && pwd)
base=$(container_base "$cache") || die "no base system; debootstrap needs a Debian mirror"
work=$(mktemp -d "$cache/run.XXXXXX")
root=$work/root
loop=

finish() {
    container_end
    # Kept when something failed: the journal of the container is in it.
    if [ "$failed" = 0 ]; then rm -rf "$work"; else echo "kept for a look: $work (journalctl -D $root/var/log/journal)"; fi
}
passed=0
failed=0
trap finish EXIT
trap 'exit 130' INT TERM

# Waits until a command succeeds; false after so many seconds.
within() { # SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if [ "$SECONDS" -ge "$end" ]; then
            echo "    not in time: $what" >&2
            return 1
        fi
        sleep 0.2
    done
}

# A check is a function; what it prints is shown when it fails.
check() { # NAME FUNCTION
    local started=$SECONDS output code
    # Not within an `if`: bash would then forget -e.
    output=$(set -e; "$2" 2>&1)
    code=$?
    if [ "$code" = 0 ]; then
        passed=$((passed + 1))
        echo "ok   $1 ($((SECONDS - started)) s)"
    else
        failed=$((failed + 1))
        echo "FAIL $1 ($((SECONDS - started)) s)"
        printf '%s\n' "$output" | tail -n 20 | sed 's/^/    /'
        inside systemctl status bcd --no-pager -n 5 2>&1 | sed 's/^/    | /'
    fi
}

same() { # WHAT WANTED GOT
    [ "$2" = "$3" ] || {
        echo "$1: wanted '$2', got '$3'"
        return 1
    }
}

show() { inside systemctl show bcd --value -p "$1"; }
ready() { inside bcd status --brief >/dev/null 2>&1; }
ctl() { inside bcd ctl --gateway /var/tmp/gateway "$@"; }
running_anew() { # OLD-PID
    local pid
    pid=$(show MainPID)
    [ "$pid" != 0 ] && [ "$pid" != "$1" ] && ready
}

# shellcheck source=tests/systemd/checks.sh
. "$here/checks.sh"

cp -a "$base" "$root" || die "cannot copy $base"
cp "$deb" "$root/root/bcd.deb"
mkdir -p "$root/var/log/journal"
container_boot || die "the container did not boot; its console: $(tail -n 5 "$work/console.log")"
run_checks
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
