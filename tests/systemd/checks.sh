# shellcheck shell=bash disable=SC2154 # work and root are run.sh's
# What is checked, in its order: each check stands on the state that those before it left.

run_checks() {
    find_ours >"$work/before"
    check "a fresh package neither enables nor starts an unjoined node" fresh_install
    check "the unit's exposure is at most 2.5 and it has no errors" exposure
    check "a start without an identity is skipped and is no failure" unjoined_start
    check "join, enable, start: READY is reached and a session is live" join_and_start
    check "the sandbox is in force: no capability, no new privileges, a syscall filter" sandbox
    check "the journal has the log with a field for each value" journal_fields
    check "a second daemon by hand is refused and names the holder" second_daemon
    check "a program runs and its output arrives" run_program
    check "systemctl restart with a program in flight: its true result arrives, it ran once" restart_in_flight
    check "a program has a unit of its own, and a cancel ends it" program_unit
    check "a program whose supervisor is killed is ended and told of as interrupted" supervisor_killed
    check "kill -9: systemd starts it again after 5 s, it is ready, and the program in flight is told of" kill_nine
    check "a hung daemon is aborted by the watchdog and started again" watchdog
    check "systemctl stop ends cleanly within 10 s and says Goodbye" clean_stop
    check "a wrong configuration ends with 78 and is not tried again" wrong_configuration
    check "reboot: another boot id, the node is there again and tells that the shutdown ended the program" reboot
    check "an upgrade keeps the configuration and restarts the node" upgrade
    check "remove keeps identity, journal and configuration" remove
    check "purge leaves nothing" purge
}

# Files of ours; the package manager's own notes and this test's gateway are not.
find_ours() {
    find "$root/etc" "$root/usr" "$root/var" "$root/run" "$root/lib" -name '*bcd*' \
        -not -path '*/var/lib/dpkg/*' -not -path '*/var/tmp/*' -not -path '*/var/log/*' | sort
}

fresh_install() {
    inside dpkg -i /root/bcd.deb
    same "enabled" disabled "$(inside systemctl is-enabled bcd || true)"
    same "active" inactive "$(inside systemctl is-active bcd || true)"
    same "state directory" "700 root" "$(inside stat -c '%a %U' /var/lib/bcd)"
    same "configuration" "644 root" "$(inside stat -c '%a %U' /etc/bcd/bcd.toml)"
    inside bcd config check
}

exposure() {
    inside systemd-analyze security --offline=true --threshold=25 /usr/lib/systemd/system/bcd.service | tail -n 1
    # Manual pages cannot be looked up in a minimal system.
    inside systemd-analyze verify --man=no /usr/lib/systemd/system/bcd.service
}

unjoined_start() {
    inside systemctl start bcd
    same "active" inactive "$(inside systemctl is-active bcd || true)"
    same "condition" no "$(show ConditionResult)"
}

join_and_start() {
    # Commands of this test are unsigned, and it does not wait half a minute for the watchdog.
    printf '[signatures]\ncommands = "none"\n' >"$root/etc/bcd/bcd.toml"
    mkdir -p "$root/etc/systemd/system/bcd.service.d"
    printf '[Service]\nWatchdogSec=8\n' >"$root/etc/systemd/system/bcd.service.d/test.conf"
    cat >"$root/etc/systemd/system/test-gateway.service" <<-UNIT
	[Service]
	ExecStartPre=/bin/ip link set lo up
	ExecStart=/usr/bin/bcd gateway --state /var/tmp/gateway --ticket /var/tmp/ticket --heartbeat-interval 1s
	Restart=always
	RestartSec=1
	[Install]
	WantedBy=multi-user.target
	UNIT
    inside systemctl daemon-reload
    inside systemctl enable -q --now test-gateway
    within 20 "a ticket" inside test -s /var/tmp/ticket
    inside bcd join --ticket /var/tmp/ticket
    inside systemctl enable -q --now bcd
    same "active" active "$(inside systemctl is-active bcd)"
    within 30 "a session" ready
    case $(show StatusText) in "live with "*) ;; *) echo "StatusText: $(show StatusText)"; return 1 ;; esac
}

sandbox() {
    local status
    status=$(inside cat "/proc/$(show MainPID)/status")
    same "capabilities" 0000000000000000 "$(sed -n 's/^CapBnd:\t//p' <<<"$status")"
    same "no new privileges" 1 "$(sed -n 's/^NoNewPrivs:\t//p' <<<"$status")"
    same "seccomp" 2 "$(sed -n 's/^Seccomp:\t//p' <<<"$status")"
}

journal_fields() {
    within 10 "the fields" has_fields
}

has_fields() {
    local log
    log=$(inside journalctl -u bcd -o json --no-pager)
    grep -q '"BCD_NODE_ID":"n-' <<<"$log" && grep -q '"SYSLOG_IDENTIFIER":"bcd"' <<<"$log" && grep -q '"PRIORITY":"6"' <<<"$log"
}

second_daemon() {
    local said code=0
    said=$(inside bcd node 2>&1) || code=$?
    [ "$code" != 0 ] || { echo "it ran"; return 1; }
    grep -q "$(show MainPID)" <<<"$said" || { echo "the holder is not named: $said"; return 1; }
    ready
}

run_program() {
    same "output" hello "$(ctl exec - -- /bin/echo hello)"
}

# Starts a program that leaves a line when it starts and one when it ends; prints the command's id. Who waits for it
# in `bcd ctl` is of no interest.
start_program() { # NAME SECONDS
    inside systemd-run -q --collect bcd ctl --gateway /var/tmp/gateway exec - -- \
        /bin/sh -c "echo start >>/var/tmp/$1; sleep $2; echo end >>/var/tmp/$1"
    within 20 "the program has started" has_lines "$1" start 1
    ctl --json list --limit 1 | grep -o '"c-[0-9a-f]*"' | head -n 1 | tr -d '"'
}

lines() { grep -c "$2" "$root/var/tmp/$1" 2>/dev/null || true; }
has_lines() { [ "$(lines "$1" "$2")" = "$3" ]; }
shown() { ctl --json show "$1" | grep -q "$2"; }

restart_in_flight() {
    local id old
    id=$(start_program restarted 8)
    old=$(show MainPID)
    inside systemctl restart bcd
    within 30 "ready again" running_anew "$old"
    within 40 "the result" shown "$id" succeeded
    same "starts" 1 "$(lines restarted start)"
    same "ends" 1 "$(lines restarted end)"
}

# A program in flight: it has neither the daemon's control group nor its sandbox.
unit_of_a_program() { inside systemctl list-units --plain --no-legend 'bcd-exec-*.service' | cut -d' ' -f1; }

program_unit() {
    local id unit
    id=$(start_program apart 600)
    unit=$(unit_of_a_program)
    same "units" 1 "$(wc -w <<<"$unit")"
    same "its group" "0::/system.slice/$unit" "$(inside sh -c "grep ^0:: /proc/$(inside systemctl show "$unit" --value -p MainPID)/cgroup" | cut -d/ -f1-3)"
    ctl cancel "$id"
    within 30 "the result" shown "$id" cancelled
    within 10 "the unit is gone" no_program_is_left
}

no_program_is_left() { [ -z "$(unit_of_a_program)" ] && ! inside pgrep -f 'sleep 600' >/dev/null; }

# Its supervisor killed: systemd ends what it started, and nobody guesses at a result.
supervisor_killed() {
    local id unit
    id=$(start_program bereft 600)
    unit=$(unit_of_a_program)
    inside systemctl kill --kill-who=main --signal=KILL "$unit"
    within 30 "the result" shown "$id" interrupted
    within 10 "the unit is gone" no_program_is_left
}

kill_nine() {
    local id old started=$SECONDS
    id=$(start_program killed 4)
    old=$(show MainPID)
    inside kill -9 "$old"
    within 40 "ready again" running_anew "$old"
    [ $((SECONDS - started)) -ge 4 ] || { echo "after $((SECONDS - started)) s, not 5"; return 1; }
    within 40 "the result of what ended meanwhile" shown "$id" succeeded
    same "starts" 1 "$(lines killed start)"
    inside systemctl reset-failed bcd
}

watchdog() {
    local old
    old=$(show MainPID)
    inside kill -STOP "$old"
    within 60 "ready again" running_anew "$old"
    inside journalctl -u bcd --no-pager | grep -q "Watchdog timeout" || { echo "no word of the watchdog"; return 1; }
    inside systemctl reset-failed bcd
}

clean_stop() {
    local started=$SECONDS
    inside systemctl stop bcd
    [ $((SECONDS - started)) -le 10 ] || { echo "it took $((SECONDS - started)) s"; return 1; }
    same "result" success "$(show Result)"
    inside systemctl start bcd
    within 30 "ready again" ready
}

wrong_configuration() {
    cp "$root/etc/bcd/bcd.toml" "$work/bcd.toml"
    echo 'levle = "info"' >>"$root/etc/bcd/bcd.toml"
    inside systemctl restart bcd || true
    sleep 7
    same "state" failed "$(inside systemctl is-failed bcd || true)"
    same "exit code" 78 "$(show ExecMainStatus)"
    cp "$work/bcd.toml" "$root/etc/bcd/bcd.toml"
    inside systemctl reset-failed bcd
    inside systemctl start bcd
    within 30 "ready again" ready
}

reboot() {
    local id before
    id=$(start_program rebooted 600)
    before=$(inside cat /proc/sys/kernel/random/boot_id)
    container_reboot
    [ "$before" != "$(inside cat /proc/sys/kernel/random/boot_id)" ] || { echo "the same boot id"; return 1; }
    within 60 "ready after the boot" ready
    within 40 "the result" shown "$id" '"signal"'
    same "starts" 1 "$(lines rebooted start)"
}

upgrade() {
    local old
    old=$(show MainPID)
    inside dpkg -i --force-confold /root/bcd.deb
    within 40 "ready again" running_anew "$old"
    grep -q '"none"' "$root/etc/bcd/bcd.toml" || { echo "the configuration was replaced"; return 1; }
    same "enabled" enabled "$(inside systemctl is-enabled bcd)"
}

remove() {
    inside dpkg -r bcd
    [ -f "$root/var/lib/bcd/identity.json" ] && [ -f "$root/var/lib/bcd/journal.db" ] && [ -f "$root/etc/bcd/bcd.toml" ]
    same "processes left" "" "$(inside pgrep -af '^/usr/bin/bcd node' || true)"
}

purge() {
    # These two are the test's.
    inside systemctl disable -q --now test-gateway || true
    rm -rf "$root/etc/systemd/system/bcd.service.d"
    inside dpkg -P bcd
    find_ours >"$work/after"
    diff "$work/before" "$work/after"
    [ ! -e "$root/etc/bcd" ] && [ ! -e "$root/var/lib/bcd" ]
    inside test ! -e /run/bcd
}
