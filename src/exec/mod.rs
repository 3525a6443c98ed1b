//! The executor: verify, admit, journal, effect, journal, answer. Lanes, cancellation, and a file a kind.

pub mod lanes;

pub use lanes::Lanes;
