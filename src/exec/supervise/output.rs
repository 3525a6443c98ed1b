//! One output stream of a program: bounded memory whatever it writes, digest and size over all of it.

use std::collections::VecDeque;

use data_encoding::BASE64;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::model::Digest;

/// What is kept of a stream. The program feels back-pressure: nothing is read before the last piece is counted.
#[derive(Debug)]
pub(super) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_most: usize,
    tail_most: usize,
    size: u64,
    hash: Sha256,
}

/// A stream as it stands in a result.
#[derive(Debug, Serialize)]
pub(super) struct Stream {
    /// First bytes, base64.
    head: String,
    /// Last bytes behind the head, base64.
    tail: String,
    /// All bytes written.
    size: u64,
    /// SHA-256 of all bytes written.
    sha256: Digest,
    /// Bytes between head and tail were dropped.
    truncated: bool,
}

impl Capture {
    /// Keeps at most `limit` bytes, head and tail together.
    pub(super) fn new(limit: usize) -> Self {
        let tail_most = limit / 2;
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            head_most: limit - tail_most,
            tail_most,
            size: 0,
            hash: Sha256::new(),
        }
    }

    /// Takes what was read.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.hash.update(bytes);
        let to_head = bytes.len().min(self.head_most - self.head.len());
        let (head, rest) = bytes.split_at(to_head);
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(self.tail_most)..];
        let surplus = (self.tail.len() + rest.len()).saturating_sub(self.tail_most);
        self.tail.drain(..surplus);
        self.tail.extend(rest);
    }

    /// The stream for a result.
    pub(super) fn into_stream(mut self) -> Stream {
        let kept = self.head.len() + self.tail.len();
        Stream {
            head: BASE64.encode(&self.head),
            tail: BASE64.encode(self.tail.make_contiguous()),
            size: self.size,
            sha256: Digest(self.hash.finalize().into()),
            truncated: kept as u64 != self.size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(text: &str) -> Vec<u8> {
        BASE64.decode(text.as_bytes()).expect("base64")
    }

    #[test]
    fn a_stream_within_the_limit_is_kept_whole() {
        let mut capture = Capture::new(5);
        capture.take(b"a\0");
        capture.take(b"\xff\nz");
        let stream = capture.into_stream();
        assert_eq!([decoded(&stream.head), decoded(&stream.tail)].concat(), b"a\0\xff\nz");
        assert!(!stream.truncated);
        assert_eq!(stream.sha256, Digest::of(b"a\0\xff\nz"));
    }

    #[test]
    fn a_longer_stream_keeps_head_and_tail_and_says_so_however_it_is_cut() {
        let all: Vec<u8> = (0..=255).collect();
        for piece in [1, 3, 7, 100, 256] {
            let mut capture = Capture::new(11);
            all.chunks(piece).for_each(|bytes| capture.take(bytes));
            let stream = capture.into_stream();
            assert_eq!(decoded(&stream.head), &all[..6]);
            assert_eq!(decoded(&stream.tail), &all[251..]);
            assert_eq!((stream.size, stream.truncated), (256, true));
            assert_eq!(stream.sha256, Digest::of(&all));
        }
    }

    #[test]
    fn a_limit_of_nothing_keeps_size_and_digest() {
        let mut capture = Capture::new(0);
        capture.take(b"abc");
        let stream = capture.into_stream();
        assert_eq!((stream.head.as_str(), stream.tail.as_str(), stream.size), ("", "", 3));
        assert!(stream.truncated);
    }
}
