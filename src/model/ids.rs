//! Ids and digests: bounded once, where they enter.

use std::fmt;

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::limits::ID_BYTES;

/// A string that is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an id: {shown:?} (1 to {ID_BYTES} bytes of A-Z a-z 0-9 . _ : -, alphanumeric at both ends, without ..)"
)]
pub struct BadId {
    shown: String,
}

fn check(text: &str) -> Result<(), BadId> {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-');
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    let good = bytes.len() <= ID_BYTES
        && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().copied().all(inner)
        && !text.contains("..");
    if good { Ok(()) } else { Err(BadId { shown: text.chars().take(40).collect() }) }
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl $name {
            /// Checks the text; see [`BadId`] for what an id is.
            ///
            /// # Errors
            /// The text is not an id.
            pub fn new(text: impl Into<String>) -> Result<Self, BadId> {
                let text = text.into();
                check(&text)?;
                Ok(Self(text.into_boxed_str()))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadId;
            fn try_from(text: String) -> Result<Self, BadId> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.into_string()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )+};
}

ids! {
    /// One machine, given at join.
    NodeId,
    /// One question of the control plane for all that a host holds.
    BarrierId,
    /// One command.
    CommandId,
    /// One journal file, random.
    JournalId,
    /// One daemon process, random.
    Incarnation,
    /// One boot of the kernel.
    BootId,
}

macro_rules! random_ids {
    ($($name:ident => $prefix:literal),+ $(,)?) => {$(
        impl $name {
            /// A new random id: 128 bits in lower-case hex behind a prefix.
            pub fn random(rng: &mut impl rand::RngCore) -> Self {
                let mut bytes = [0_u8; 16];
                rng.fill_bytes(&mut bytes);
                Self(format!(concat!($prefix, "{}"), HEXLOWER.encode(&bytes)).into_boxed_str())
            }
        }
    )+};
}

random_ids! { JournalId => "j-", Incarnation => "i-", BootId => "b-", NodeId => "n-", CommandId => "c-" }

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The SHA-256 of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// From exactly 32 bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// From 64 lower-case hex digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        Self::from_slice(&HEXLOWER.decode(text.as_bytes()).ok()?)
    }

    /// 64 lower-case hex digits.
    pub fn hex(&self) -> String {
        HEXLOWER.encode(&self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.hex())
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Self::from_hex(&text).ok_or_else(|| serde::de::Error::custom("not a SHA-256 in lower-case hex"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_bounded_and_starts_and_ends_alphanumeric() {
        for good in ["n-01JD", "a", "A.b_c:d-9", &"x".repeat(ID_BYTES)] {
            assert!(NodeId::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "a..b", "a/b", "a b", "ä", "a\0", &"x".repeat(ID_BYTES + 1)] {
            assert!(NodeId::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_digest_reads_back_from_its_hex() {
        let digest = Digest::of(b"bcd");
        assert_eq!(Digest::from_hex(&digest.hex()), Some(digest));
        assert_eq!(Digest::from_hex("00"), None);
    }
}
