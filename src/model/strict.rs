//! Strict JSON: a doubled key is refused everywhere, an unknown one is told apart from every other error.
//!
//! Structs refuse doubled fields by serde's own derive; maps must be a [`StrictMap`]. Unknown fields are
//! gathered, so that `unsupported-field` and `invalid-arguments` never pass for each other. A list is never taken for a
//! struct ([`Object`]): its values would be fields by their place, without a name that could be unknown.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// What is wrong with a strict document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StrictError {
    /// A field that this build does not know; its path.
    #[error("unknown field {0}")]
    UnsupportedField(String),
    /// Anything else: not JSON, a doubled key, a wrong type, a value out of range.
    #[error("{0}")]
    Invalid(String),
}

/// Parses strict JSON.
///
/// # Errors
/// See [`StrictError`]; an error of shape wins over an unknown field.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StrictError> {
    let mut unknown: Option<String> = None;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let Object(value) = serde_ignored::deserialize(&mut json, |path| {
        unknown.get_or_insert_with(|| path.to_string());
    })
    .map_err(|error| StrictError::Invalid(error.to_string()))?;
    json.end().map_err(|error| StrictError::Invalid(error.to_string()))?;
    match unknown {
        Some(path) => Err(StrictError::UnsupportedField(path)),
        None => Ok(value),
    }
}

/// A struct that is read from an object alone. serde's derive also takes a list, value by value. [`parse`] asks for one; a
/// struct within another is read by [`object`] or [`optional`].
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Map<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(access))
            }
        }
        deserializer.deserialize_map(Map(PhantomData)).map(Object)
    }
}

/// For a field that is a struct of its own: `#[serde(deserialize_with = "strict::object")]`.
///
/// # Errors
/// The struct's.
pub fn object<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Object::deserialize(deserializer).map(|Object(value)| value)
}

/// For a field that is a struct of its own, or null: `#[serde(deserialize_with = "strict::optional")]`.
///
/// # Errors
/// Neither, or the struct's.
pub fn optional<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(value)| value))
}

/// A map that refuses a doubled key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct StrictMap<V>(pub BTreeMap<String, V>);

impl<V> StrictMap<V> {
    /// Whether there is nothing in it, for `skip_serializing_if`.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<V> Default for StrictMap<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for StrictMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Unique<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
            type Value = StrictMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map without doubled keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<StrictMap<V>, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((key, value)) = access.next_entry::<String, V>()? {
                    if map.contains_key(&key) {
                        return Err(serde::de::Error::custom(format_args!("doubled key {key:?}")));
                    }
                    map.insert(key, value);
                }
                Ok(StrictMap(map))
            }
        }
        deserializer.deserialize_map(Unique(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Doc {
        n: u32,
        #[serde(default)]
        map: StrictMap<u32>,
    }

    #[test]
    fn an_unknown_field_is_told_apart_from_every_other_error() {
        assert!(parse::<Doc>(br#"{"n":1,"map":{"a":1}}"#).is_ok());
        let unknown = parse::<Doc>(br#"{"n":1,"limit":2}"#);
        assert_eq!(unknown, Err(StrictError::UnsupportedField("limit".into())));
        for bad in [
            &br#"{"n":1,"n":2}"#[..],
            br#"{"n":1,"map":{"a":1,"a":2}}"#,
            br#"{"n":-1}"#,
            br#"{"n":1} x"#,
            br#"{"n":1"#,
            br#"[1,{}]"#,
            b"[1]",
            b"\xff",
        ] {
            assert!(matches!(parse::<Doc>(bad), Err(StrictError::Invalid(_))), "{bad:?}");
        }
    }
}
