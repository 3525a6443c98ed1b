//! The token of durability.

use std::ops::Deref;

/// Proof that `T` stands in the journal, on stable storage. Only the journal makes one, after its sync.
#[derive(Debug, Clone)]
pub struct Durable<T>(T);

impl<T> Durable<T> {
    /// Only after the commit that holds `value` has been synced.
    pub(in crate::journal) fn after_sync(value: T) -> Self {
        Self(value)
    }

    /// The value, without the proof.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for Durable<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
