//! A Welcome is judged before anything of it is applied.

use super::{APPLY_DEADLINE, Machine, Now, Output, State, Terms};
use crate::model::{Reason, ServerTime};
use crate::session::working_clock::REWIND_ALLOWANCE;
use crate::wire::frames::Welcome;
use crate::wire::link::{Endpoint, Validity};
use crate::wire::version::Range;

impl Machine {
    pub(super) fn welcome(
        &mut self,
        now: Now,
        endpoint: Endpoint,
        welcome: Box<Welcome>,
        outputs: &mut Vec<Output>,
    ) {
        if let Err((reason, detail)) = self.judge(now, &welcome) {
            outputs.push(Output::RecordEpoch(welcome.epoch));
            self.close(now, reason, detail, outputs);
            return;
        }
        let terms = Terms {
            session_id: welcome.session_id.clone(),
            endpoint,
            gateway_id: welcome.gateway_id.clone(),
            epoch: welcome.epoch,
            proto: welcome.proto,
            proto_max: welcome.proto_max,
            heartbeat_interval: welcome.heartbeat_interval,
        };
        self.enter(now, State::ApplyingWelcome { terms, deadline: now.mono + APPLY_DEADLINE });
        outputs.push(Output::Apply(welcome));
    }

    /// Whether a Welcome may be applied. The working clock is the server time mark.
    fn judge(&self, now: Now, welcome: &Welcome) -> Result<(), (Reason, String)> {
        let time = welcome.server_time;
        if let Some(mark) = now.working.filter(|mark| time < mark.minus(REWIND_ALLOWANCE)) {
            let detail = format!(
                "the gateway says {time}, more than 5 minutes before {mark}, which this node has seen"
            );
            return Err((Reason::TimeBackwards, detail));
        }
        let not_after = self.used.validity.not_after;
        // At that instant already: such a time would be this node's own, and no later dial would offer the certificate.
        if time >= not_after {
            let detail =
                format!("the gateway says {time} but took a certificate that ran out at {not_after}");
            return Err((Reason::TimeAhead, detail));
        }
        if !Range::OWN.contains(welcome.proto) {
            let (min, max) = (Range::OWN.min(), Range::OWN.max());
            let detail =
                format!("the gateway chose version {}, this build speaks {min} to {max}", welcome.proto);
            return Err((Reason::ProtocolVersion, detail));
        }
        Ok(())
    }
}

/// Without server time the dial could not judge the gateway's certificate; the first time that comes over it must.
pub(super) fn vouch(validity: Option<Validity>, time: ServerTime) -> Result<(), (Reason, String)> {
    match validity {
        Some(Validity { not_before, .. }) if time < not_before => Err((
            Reason::TimeBackwards,
            format!("the gateway says {time}, and its own certificate holds only from {not_before} on"),
        )),
        Some(Validity { not_after, .. }) if time >= not_after => Err((
            Reason::TimeAhead,
            format!("the gateway says {time}, and its own certificate ran out at {not_after}"),
        )),
        _ => Ok(()),
    }
}
