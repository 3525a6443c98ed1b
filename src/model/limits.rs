//! The limits of the wire, both directions. A length that a peer claims is held against this table before
//! memory is taken.

use std::time::Duration;

/// A frame, decoded, bytes. A larger one ends the session.
pub const FRAME_BYTES: usize = 4 << 20;
/// Messages and entries of lists within a frame, all together: each takes a hundred bytes of memory and may be two on the
/// wire. A Hello's results, with a message or two in each, are the most that a frame of ours has.
pub const FRAME_ELEMENTS: usize = 1 << 15;
/// A command's signed body, bytes.
pub const COMMAND_BODY_BYTES: usize = 1 << 20;
/// A kind's output within a result, bytes. Longer output is cut and says so.
pub const RESULT_BYTES: usize = 256 << 10;
/// Done results within one Hello, bytes; the rest follow as frames.
pub const HELLO_RESULTS_BYTES: usize = 256 << 10;
/// An id, bytes.
pub const ID_BYTES: usize = 128;
/// An event's body, bytes.
pub const EVENT_BYTES: usize = 64 << 10;
/// Bodies of one batch of events, bytes together: what may stand before a result on a slow wire.
pub const EVENT_BATCH_BYTES: usize = 256 << 10;
/// Events of one batch.
pub const EVENT_BATCH: usize = 512;
/// A text for people (message, reason detail), bytes.
pub const TEXT_BYTES: usize = 1024;
/// A reason token, bytes.
pub const REASON_BYTES: usize = 64;
/// A text for people within its limit, cut at a character: a peer's own words may stand in it.
pub fn cut_text(text: impl Into<String>) -> String {
    let mut text = text.into();
    text.truncate(text.floor_char_boundary(TEXT_BYTES));
    text
}

/// Signatures in an envelope.
pub const SIGNATURES: usize = 8;
/// Certificates in a signature's chain.
pub const CHAIN: usize = 4;
/// Approvals beside a command.
pub const APPROVALS: usize = 16;
/// Entries of a map or list in a frame, where no row above says otherwise.
pub const ENTRIES: usize = 1024;
/// Capabilities in a Hello.
pub const CAPABILITIES: usize = 64;
/// Facts in a JoinRequest.
pub const JOIN_FACTS: usize = 64;
/// A join ticket's file, bytes.
pub const TICKET_BYTES: usize = 64 << 10;
/// Arguments of a program.
pub const ARGV: usize = 4096;
/// One argument or environment value of a program, bytes (the kernel's MAX_ARG_STRLEN).
pub const ARG_BYTES: usize = 128 << 10;
/// Head and tail of one output stream of a program kept in a result, bytes together.
pub const STREAM_BYTES: usize = 64 << 10;
/// How far not_after may lie behind issued_at.
pub const COMMAND_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// A tombstone outlives not_after by this much, in signed time.
pub const TOMBSTONE_GRACE: Duration = Duration::from_secs(300);
/// Results that may wait for an ack; the cap holds before a REJECTED is written too.
pub const UNACKED_RESULTS: u64 = 10_000;

/// Labels of a node.
pub const LABELS: usize = 32;
/// A label's name or value, bytes.
pub const LABEL_BYTES: usize = 63;
