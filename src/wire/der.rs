//! Bytes in JSON: base64.

use bytes::Bytes;
use data_encoding::BASE64;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes of a certificate, a key or a signature, base64 in JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Der(pub Bytes);

impl From<&[u8]> for Der {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

impl Serialize for Der {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Der {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        let bytes = BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)?;
        Ok(Self(bytes.into()))
    }
}

/// For a field of bytes: `#[serde(with = "one")]`.
pub mod one {
    use super::{Bytes, Der, Deserialize as _, Deserializer, Serialize as _, Serializer};

    /// Writes it.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        Der(bytes.clone()).serialize(serializer)
    }

    /// Reads it.
    ///
    /// # Errors
    /// Not base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        Ok(Der::deserialize(deserializer)?.0)
    }
}

/// For a list of bytes: `#[serde(with = "list")]`.
pub mod list {
    use super::{Bytes, Der, Deserialize as _, Deserializer, Serializer};

    /// Writes it.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(list: &[Bytes], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list.iter().map(|bytes| Der(bytes.clone())))
    }

    /// Reads it.
    ///
    /// # Errors
    /// Not base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Bytes>, D::Error> {
        Ok(Vec::<Der>::deserialize(deserializer)?.into_iter().map(|der| der.0).collect())
    }
}
