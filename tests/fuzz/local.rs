//! What is read from sockets of this machine: a status socket's questions, a gateway's and a worker's lines, a supervisor's
//! job. Whoever reaches them is trusted to ask, not to ask well.

use bcd::exec::supervise::job::{self, Job};
use bcd::gateway::control;
use bcd::gateway::worker::{Ask, Order, Told};
use bcd::status::socket::{Changed, Question};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::grammar::Format;
use crate::harness::Target;

/// Whether it is a `T`, and then what is written of it is the same one.
fn read<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> bool {
    let Ok(message) = serde_json::from_slice::<T>(bytes) else { return false };
    let text = serde_json::to_vec(&message).expect("JSON");
    let again: T = serde_json::from_slice(&text).expect("our own");
    assert_eq!(serde_json::to_vec(&again).expect("JSON"), text);
    true
}

/// As one of the two ends of a supervisor's standard input reads it.
fn received<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> bool {
    let Ok(message) = job::receive::<T>(bytes) else { return false };
    let mut line = Vec::new();
    job::send(&mut line, &message).expect("written");
    assert!(line.ends_with(b"\n") && line.iter().filter(|byte| **byte == b'\n').count() == 1, "one line");
    let again: T = job::receive(&*line).expect("our own");
    let value = |message: &T| serde_json::to_value(message).expect("JSON");
    assert_eq!(value(&again), value(&message));
    true
}

fn check(bytes: &[u8]) -> bool {
    let question = Question::parse(bytes);
    if let Some(question) = &question {
        assert_eq!(question.line().as_bytes(), bytes, "one question, one line");
    }
    question.is_some()
        | read::<control::Request>(bytes)
        | read::<control::Response>(bytes)
        | read::<Ask>(bytes)
        | read::<Order>(bytes)
        | read::<Told>(bytes)
        | read::<Changed>(bytes)
        | received::<Job>(bytes)
        | received::<job::Answer>(bytes)
}

#[test]
fn a_line_of_a_local_socket_is_read_the_same_again_or_refused() {
    Target { name: "lines", format: Format::Json, check, memory: 128 << 10, per_byte: 320 }.run();
}

/// A sender that never ends its line is not followed for ever.
#[test]
fn a_message_without_an_end_is_given_up_at_its_limit() {
    struct Endless(u64);
    impl std::io::Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0 += buffer.len() as u64;
            buffer.fill(b' ');
            Ok(buffer.len())
        }
    }
    let mut endless = Endless(0);
    assert!(job::receive::<Value>(&mut endless).is_err());
    assert!(endless.0 < 16 << 20, "{} bytes were read", endless.0);
}
