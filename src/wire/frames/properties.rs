//! What holds for every frame that a gateway may send, whatever its bytes.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use prost::Message as _;

use super::*;
use crate::model::limits::TEXT_BYTES;

/// The same cases in every run: a test that fails now and then says nothing about the change at hand.
fn config() -> ProptestConfig {
    ProptestConfig { rng_seed: RngSeed::Fixed(1), failure_persistence: None, ..ProptestConfig::default() }
}

fn envelope() -> impl Strategy<Value = pb::Envelope> {
    let signatures = vec(vec(any::<u8>(), 0..4), 0..SIGNATURES + 2).prop_map(|bytes| {
        let signature = |bytes: Vec<u8>| pb::Signature { signature: bytes.into(), ..Default::default() };
        bytes.into_iter().map(signature).collect()
    });
    ("[a-z/+]{0,80}", vec(any::<u8>(), 0..64), signatures).prop_map(|(payload_type, payload, signatures)| {
        pb::Envelope { payload_type, payload: payload.into(), signatures }
    })
}

fn frame() -> impl Strategy<Value = pb::gateway_frame::Frame> {
    use pb::gateway_frame::Frame;
    let command = (proptest::option::of(envelope()), vec(envelope(), 0..APPROVALS + 2))
        .prop_map(|(envelope, approvals)| pb::Command { envelope, approvals, ..Default::default() });
    let welcome = (any::<u64>(), any::<i64>(), any::<u32>(), any::<String>()).prop_map(
        |(epoch, time, interval, id)| pb::Welcome {
            epoch,
            server_time_ms: time,
            heartbeat_interval_ms: interval,
            gateway_id: id,
            ..Default::default()
        },
    );
    let cancel = (any::<String>(), proptest::option::of(envelope()))
        .prop_map(|(command_id, envelope)| pb::Cancel { command_id, envelope });
    let drain =
        (any::<u32>(), any::<String>()).prop_map(|(max_delay_ms, reason)| pb::Drain { max_delay_ms, reason });
    let notice = || proptest::option::of(envelope());
    let bundle = notice().prop_map(|envelope| pb::TrustBundle { envelope });
    let revoked = notice().prop_map(|envelope| pb::RevocationNotice { envelope });
    prop_oneof![
        command.prop_map(Frame::Command),
        welcome.prop_map(Frame::Welcome),
        cancel.prop_map(Frame::Cancel),
        drain.prop_map(Frame::Drain),
        bundle.prop_map(Frame::TrustBundle),
        revoked.prop_map(Frame::RevocationNotice),
    ]
}

fn within_the_limits(inbound: &Inbound) {
    match inbound {
        Inbound::Welcome(welcome) => {
            assert!(welcome.epoch > 0);
            assert!((1_000..=60_000).contains(&welcome.heartbeat_interval.as_millis()));
            assert!(!welcome.gateway_id.chars().any(char::is_control));
        }
        Inbound::Delivery(Delivery::Command(command)) => {
            assert!(command.approvals.len() <= APPROVALS);
            for envelope in command.approvals.iter().chain([&command.envelope]) {
                assert!(envelope.payload.len() <= COMMAND_BODY_BYTES);
                assert!(envelope.signatures.len() <= SIGNATURES && envelope.payload_type.len() <= ID_BYTES);
            }
        }
        Inbound::Drain { max_delay, reason } => {
            assert!(*max_delay <= MAX_DRAIN && !reason.chars().any(char::is_control));
        }
        Inbound::Notice(Notice::TrustBundle(envelope) | Notice::Revocation(envelope)) => {
            assert!(envelope.payload.len() <= COMMAND_BODY_BYTES);
            assert!(envelope.signatures.len() <= SIGNATURES && envelope.payload_type.len() <= ID_BYTES);
        }
        Inbound::Ack(_)
        | Inbound::Delivery(_)
        | Inbound::BadCancel(_)
        | Inbound::BadNotice(_)
        | Inbound::UnsignedRevocation
        | Inbound::Ignored(_) => {}
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_frame_is_within_the_limits_or_refused(frame in frame()) {
        let read = Inbound::try_from(pb::GatewayFrame { frame: Some(frame) });
        if let Ok(inbound) = &read {
            within_the_limits(inbound);
        }
    }

    #[test]
    fn a_damaged_frame_is_within_the_limits_or_refused(
        frame in frame(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = pb::GatewayFrame { frame: Some(frame) }.encode_to_vec();
        for (at, byte) in damage {
            *at.get_mut(&mut bytes) = byte;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(frame) = pb::GatewayFrame::decode(&*bytes)
            && let Ok(inbound) = Inbound::try_from(frame)
        {
            within_the_limits(&inbound);
        }
    }

    #[test]
    fn a_text_is_cut_to_a_beginning_of_itself(text in any::<String>(), times in 1_usize..200) {
        let text = text.repeat(times);
        let kept = cut_text(text.as_str());
        prop_assert!(kept.len() <= TEXT_BYTES && text.starts_with(&kept));
        prop_assert!(kept.len() == text.len() || kept.len() + 4 > TEXT_BYTES, "more was cut than must be");
    }
}
