//! What every [`Link`] promises, held against each of them. The gateway's part is the same for all: it acks every
//! heartbeat by its number, and ends the call `storm` at a Goodbye.

use std::time::Duration;

use tokio::sync::mpsc;

use super::link::{EndKind, Link};
use super::pb;
use super::pb::gateway_frame::Frame as Down;
use super::pb::node_frame::Frame as Up;
use crate::model::Reason;

/// A link, and the frames that reach its far end.
pub(super) type Opened = (Box<dyn Link>, mpsc::UnboundedReceiver<pb::NodeFrame>);

/// What the gateway says to a frame.
#[expect(clippy::large_enum_variant, reason = "a handful of them live for a test")]
pub(super) enum Reply {
    Say(Down),
    End,
}

pub(super) fn reply(frame: &pb::NodeFrame) -> Option<Reply> {
    match &frame.frame {
        Some(Up::Heartbeat(heartbeat)) => {
            Some(Reply::Say(Down::Ack(pb::Ack { heartbeat_seq: heartbeat.seq, ..Default::default() })))
        }
        Some(Up::Goodbye(_)) => Some(Reply::End),
        _ => None,
    }
}

pub(super) fn heartbeat(seq: u64) -> pb::NodeFrame {
    pb::NodeFrame { frame: Some(Up::Heartbeat(pb::Heartbeat { seq, ..Default::default() })) }
}

fn goodbye() -> pb::NodeFrame {
    pb::NodeFrame { frame: Some(Up::Goodbye(pb::Goodbye::default())) }
}

async fn acked(link: &mut dyn Link) -> u64 {
    match link.receive().await.expect("an ack").frame {
        Some(Down::Ack(ack)) => ack.heartbeat_seq,
        other => panic!("{other:?}"),
    }
}

/// Everything at once; `open` opens a new link each time.
pub(super) async fn holds(open: impl AsyncFn() -> Opened) {
    frames_keep_their_order_and_the_end_comes_behind_them(open().await).await;
    a_dropped_receive_loses_none(open().await).await;
    a_full_queue_gives_the_frame_back(open().await).await;
    a_close_flushes_what_is_queued(open().await).await;
}

async fn frames_keep_their_order_and_the_end_comes_behind_them((mut link, mut seen): Opened) {
    for seq in 1..=5 {
        link.send(heartbeat(seq)).expect("room");
    }
    link.send(goodbye()).expect("room");
    for seq in 1..=5 {
        assert_eq!(acked(&mut *link).await, seq);
        assert_eq!(seen.recv().await, Some(heartbeat(seq)));
    }
    let end = link.receive().await.expect_err("the end");
    assert_eq!((end.kind, end.reason), (EndKind::Unavailable, Some(Reason::Storm)));
}

async fn a_dropped_receive_loses_none((mut link, _seen): Opened) {
    let mut last = 0;
    for seq in 1..=4 {
        link.send(heartbeat(seq)).expect("room");
        // Too short for some, long enough for others: whatever comes late must come all the same.
        if let Ok(seq) = tokio::time::timeout(Duration::from_millis(1), acked(&mut *link)).await {
            assert_eq!(seq, last + 1);
            last = seq;
        }
    }
    while last < 4 {
        assert_eq!(acked(&mut *link).await, last + 1);
        last += 1;
    }
}

async fn a_full_queue_gives_the_frame_back((mut link, _seen): Opened) {
    // Nothing is awaited, so nothing is taken.
    while link.room() > 0 {
        link.send(heartbeat(1)).expect("room");
    }
    let back = link.send(heartbeat(2)).expect_err("no room");
    assert_eq!(*back.0, heartbeat(2));
    let _ = link.receive().await;
    link.flushed().await;
    assert!(link.room() > 0, "what was queued is taken once somebody receives");
}

async fn a_close_flushes_what_is_queued((mut link, mut seen): Opened) {
    for seq in 1..=3 {
        link.send(heartbeat(seq)).expect("room");
    }
    link.send(goodbye()).expect("room");
    tokio::time::timeout(Duration::from_secs(10), link.close(Duration::from_secs(5))).await.expect("bounded");
    for seq in 1..=3 {
        assert_eq!(seen.recv().await, Some(heartbeat(seq)));
    }
    assert_eq!(seen.recv().await, Some(goodbye()));
}
