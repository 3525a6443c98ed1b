//! What becomes of a command that an older incarnation left: one exhaustive match. Pure.

use super::record::State;

/// A command as a new process finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Its row's state; absent when only a begun record tells of it.
    pub row: Option<State>,
    /// Whether this very command may run twice.
    pub retry_safe: bool,
    /// A begun record of it exists.
    pub begun: bool,
    /// Executions so far.
    pub executions: u32,
    /// What is left of a process of its own.
    pub left: Left<()>,
    /// Signed time has passed not_after.
    pub expired: bool,
    /// What the boot id says of it.
    pub boot: BootSays,
}

/// What the boot id says of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BootSays {
    /// Nothing: a new boot is not what its kind is for, or its boot is not known.
    Nothing,
    /// It was to end this boot, and did not.
    SameBoot,
    /// It was to end a boot, and this is another one.
    OtherBoot,
}

/// What is left of the process that carried a command out; `O` is how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left<O> {
    /// Nothing: there was none, or it is gone without a word.
    Nothing,
    /// It is alive and will write how it ended.
    Alive,
    /// It wrote how it ended.
    Ended(O),
}

/// What it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Becomes {
    /// A result or tombstone: nothing to settle.
    Stays,
    /// Stays ACCEPTED, without a credit, until a redelivery.
    WaitsAccepted,
    /// RUNNING, without a credit, until a redelivery runs it again.
    WaitsRunning,
    /// DONE, REJECTED `expired`: nothing had begun.
    Expired,
    /// DONE, SUCCEEDED `rebooted`: the machine has another boot since it began.
    Rebooted,
    /// RUNNING under the new incarnation: its process is alive.
    Reattached,
    /// DONE, with the outcome that its process wrote.
    Ended,
    /// DONE, FAILED `interrupted`: nobody knows how far it came.
    Interrupted,
}

/// Decides.
pub fn becomes(found: Found) -> Becomes {
    let begun = found.begun || found.executions > 0;
    match (found.row, found.left) {
        (Some(State::Done | State::Tombstone), _) => return Becomes::Stays,
        (_, Left::Ended(())) => return Becomes::Ended,
        (_, Left::Alive) => return Becomes::Reattached,
        (_, Left::Nothing) => {}
    }
    let never_began = found.row == Some(State::Accepted) && !begun;
    if found.boot == BootSays::OtherBoot && !never_began {
        return Becomes::Rebooted;
    }
    match (found.row, begun, found.retry_safe, found.expired) {
        (Some(State::Done | State::Tombstone), _, _, _) => Becomes::Stays,
        (Some(State::Accepted), false, _, false) => Becomes::WaitsAccepted,
        (Some(State::Accepted), false, _, true) => Becomes::Expired,
        (Some(State::Running), _, true, false) | (Some(State::Accepted), true, true, false) => {
            Becomes::WaitsRunning
        }
        (Some(State::Running), _, true, true) | (Some(State::Accepted), true, true, true) => {
            Becomes::Interrupted
        }
        (Some(State::Running), _, false, _) | (Some(State::Accepted), true, false, _) => Becomes::Interrupted,
        // What a record tells of may have had its effect.
        (None, _, true, false) => Becomes::WaitsRunning,
        (None, _, true, true) | (None, _, false, _) => Becomes::Interrupted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCEPTED: Found = Found {
        row: Some(State::Accepted),
        retry_safe: false,
        begun: false,
        executions: 0,
        left: Left::Nothing,
        expired: false,
        boot: BootSays::Nothing,
    };
    const RUNNING: Found = Found { row: Some(State::Running), executions: 1, ..ACCEPTED };

    #[test]
    fn accepted_and_never_begun_waits_for_a_redelivery_whatever_the_kind() {
        assert_eq!(becomes(ACCEPTED), Becomes::WaitsAccepted);
        assert_eq!(becomes(Found { retry_safe: true, ..ACCEPTED }), Becomes::WaitsAccepted);
    }

    #[test]
    fn accepted_and_never_begun_is_expired_once_signed_time_has_passed_not_after() {
        assert_eq!(becomes(Found { expired: true, ..ACCEPTED }), Becomes::Expired);
        assert_eq!(becomes(Found { expired: true, retry_safe: true, ..ACCEPTED }), Becomes::Expired);
    }

    #[test]
    fn accepted_with_a_begun_record_is_settled_as_running() {
        assert_eq!(becomes(Found { begun: true, ..ACCEPTED }), Becomes::Interrupted);
        assert_eq!(becomes(Found { begun: true, expired: true, ..ACCEPTED }), Becomes::Interrupted);
        assert_eq!(becomes(Found { begun: true, retry_safe: true, ..ACCEPTED }), Becomes::WaitsRunning);
    }

    #[test]
    fn accepted_after_an_execution_is_settled_as_running() {
        assert_eq!(becomes(Found { executions: 1, ..ACCEPTED }), Becomes::Interrupted);
        assert_eq!(becomes(Found { executions: 1, retry_safe: true, ..ACCEPTED }), Becomes::WaitsRunning);
    }

    #[test]
    fn running_that_may_not_run_twice_is_interrupted() {
        for begun in [false, true] {
            for expired in [false, true] {
                assert_eq!(becomes(Found { begun, expired, ..RUNNING }), Becomes::Interrupted);
            }
        }
    }

    #[test]
    fn running_that_may_run_twice_waits_until_signed_time_passes_not_after() {
        let retry_safe = Found { retry_safe: true, ..RUNNING };
        assert_eq!(becomes(retry_safe), Becomes::WaitsRunning);
        assert_eq!(becomes(Found { expired: true, ..retry_safe }), Becomes::Interrupted);
    }

    #[test]
    fn a_reboot_that_ran_is_done_in_another_boot_and_interrupted_in_the_same_one() {
        for begun in [false, true] {
            for expired in [false, true] {
                let found = Found { begun, expired, ..RUNNING };
                assert_eq!(becomes(Found { boot: BootSays::OtherBoot, ..found }), Becomes::Rebooted);
                assert_eq!(becomes(Found { boot: BootSays::SameBoot, ..found }), Becomes::Interrupted);
            }
        }
    }

    #[test]
    fn a_reboot_that_only_a_begun_record_tells_of_is_judged_by_its_boot_too() {
        for row in [None, Some(State::Accepted)] {
            let found = Found { row, begun: true, ..RUNNING };
            assert_eq!(becomes(Found { boot: BootSays::OtherBoot, ..found }), Becomes::Rebooted);
            assert_eq!(becomes(Found { boot: BootSays::SameBoot, ..found }), Becomes::Interrupted);
            assert_eq!(becomes(found), Becomes::Interrupted, "nobody knows its boot");
        }
    }

    #[test]
    fn a_reboot_that_never_began_is_not_done_by_somebody_elses() {
        let found = Found { boot: BootSays::OtherBoot, ..ACCEPTED };
        assert_eq!(becomes(found), Becomes::WaitsAccepted);
        assert_eq!(becomes(Found { expired: true, ..found }), Becomes::Expired);
        assert_eq!(becomes(Found { row: Some(State::Done), ..found }), Becomes::Stays);
    }

    #[test]
    fn a_begun_record_without_a_row_is_interrupted() {
        assert_eq!(becomes(Found { row: None, begun: true, ..RUNNING }), Becomes::Interrupted);
    }

    #[test]
    fn a_program_whose_supervisor_lives_stays_running_whatever_the_row_says() {
        for row in [Some(State::Accepted), Some(State::Running), None] {
            for (retry_safe, expired) in [(false, false), (false, true), (true, false), (true, true)] {
                let found = Found { row, begun: true, retry_safe, expired, left: Left::Alive, ..RUNNING };
                assert_eq!(becomes(found), Becomes::Reattached, "{found:?}");
            }
        }
    }

    #[test]
    fn a_program_that_ended_while_no_daemon_ran_has_the_outcome_that_was_written() {
        for row in [Some(State::Accepted), Some(State::Running), None] {
            for (retry_safe, expired) in [(false, false), (false, true), (true, false), (true, true)] {
                let found = Found { row, begun: true, retry_safe, expired, left: Left::Ended(()), ..RUNNING };
                assert_eq!(becomes(found), Becomes::Ended, "{found:?}");
            }
        }
    }

    #[test]
    fn a_record_of_a_retry_safe_program_without_a_row_waits_for_a_redelivery() {
        let found = Found { row: None, begun: true, retry_safe: true, ..RUNNING };
        assert_eq!(becomes(found), Becomes::WaitsRunning);
        assert_eq!(becomes(Found { expired: true, ..found }), Becomes::Interrupted);
    }

    #[test]
    fn a_result_and_a_tombstone_stay_as_they_are() {
        for row in [State::Done, State::Tombstone] {
            for expired in [false, true] {
                for left in [Left::Nothing, Left::Alive, Left::Ended(())] {
                    let found = Found { row: Some(row), begun: true, expired, left, ..RUNNING };
                    assert_eq!(becomes(found), Becomes::Stays);
                }
            }
        }
    }
}
