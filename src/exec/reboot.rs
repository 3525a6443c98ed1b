//! `node.reboot`: ends the machine's boot, and with it this process.
//!
//! ACCEPTED, without a credit → delay → drain of work → RUNNING with the boot id → begun record → the reboot. Until
//! RUNNING a cancellation ends it; from then on nothing does. How it ended is decided by the next start, by the boot id
//! (journal's recovery); here only a reboot that does not happen comes to an end.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Shared;
use super::cancel::Cancelled;
use super::kinds::Ended;
use super::lanes::Closed;
use crate::failpoint;
use crate::model::{Effect, Lane, Reason, RebootArgs, Terminal};
use crate::ports::RebootError;

/// Lanes whose commands a drain waits for.
const WORK: &[Lane] = &[Lane::Work, Lane::Bulk];
/// Between two looks at what is still running; a reboot waits for no one more precisely.
const LOOK: Duration = Duration::from_millis(100);
/// A machine that has not gone down by then stays up: services may take minutes to stop.
const GOES_DOWN: Duration = Duration::from_secs(600);

/// Waits out delay and drain; nothing new is admitted until the lanes are opened by dropping what comes back. Absent:
/// cancelled.
pub(super) async fn wait(args: &RebootArgs, shared: &Shared, cancelled: &mut Cancelled) -> Option<Closed> {
    let lanes = &shared.parts.lanes;
    let ready = async {
        sleep(Duration::from_secs(args.delay_s)).await;
        let closed = lanes.close(WORK);
        if let Some(longest) = args.drain_s.map(Duration::from_secs) {
            let idle = async {
                while WORK.iter().any(|lane| lanes.held(*lane) > 0) {
                    sleep(LOOK).await;
                }
            };
            if timeout(longest, idle).await.is_err() {
                tracing::warn!("work has not ended within {} s; the reboot ends it", longest.as_secs());
            }
        }
        // The wider door first, so that none is open in between.
        let all = lanes.close(&Lane::ALL);
        drop(closed);
        all
    };
    tokio::select! {
        biased;
        () = cancelled.requested() => None,
        closed = ready => Some(closed),
    }
}

/// The effect. Comes back only where the machine stays up.
pub(super) async fn run(shared: &Shared) -> Ended {
    let _rebooting = shared.parts.lanes.rebooting();
    let asked = shared.parts.reboot.reboot().await;
    failpoint::hit(failpoint::EFFECT_STARTED);
    let why = match asked {
        Err(error @ RebootError::Refused(_)) => {
            return failed(Reason::CouldNotStart, Effect::None, error.to_string());
        }
        Err(error @ RebootError::Unanswered(_)) => error.to_string(),
        Ok(()) => "the reboot was asked for".to_owned(),
    };
    tracing::warn!("rebooting");
    sleep(GOES_DOWN).await;
    let message = format!("{why}, and the machine is still up {} s later", GOES_DOWN.as_secs());
    failed(Reason::Interrupted, Effect::Unknown, message)
}

fn failed(reason: Reason, effect: Effect, message: String) -> Ended {
    Ended { state: Terminal::Failed, reason: Some(reason), message, effect, output: Vec::new() }
}
