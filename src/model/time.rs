//! Server time: the control plane's clock, the only one that decides about a deadline.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A moment of the control plane's clock, ms since the Unix epoch. In JSON an RFC 3339 string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ServerTime(pub i64);

/// Year 9999 in ms: a larger time is nobody's clock.
const LATEST_MS: i64 = 253_402_300_799_000;

impl ServerTime {
    /// From ms since the Unix epoch as a peer claims them: positive, before the year 10000.
    pub fn from_wire(ms: i64) -> Option<Self> {
        (1..=LATEST_MS).contains(&ms).then_some(Self(ms))
    }

    /// Parses RFC 3339.
    pub fn parse(text: &str) -> Option<Self> {
        let ns = OffsetDateTime::parse(text, &Rfc3339).ok()?.unix_timestamp_nanos();
        Self::from_wire(i64::try_from(ns / 1_000_000).ok()?)
    }

    /// This much later.
    #[must_use]
    pub fn plus(self, by: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This much earlier.
    #[must_use]
    pub fn minus(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long after `earlier`; zero when it is not after it.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl fmt::Display for ServerTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000_000);
        match at.ok().and_then(|at| at.format(&Rfc3339).ok()) {
            Some(text) => f.write_str(&text),
            None => write!(f, "{} ms", self.0),
        }
    }
}

impl Serialize for ServerTime {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ServerTime {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("not an RFC 3339 time"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_reads_back_from_its_text() {
        let time = ServerTime::parse("2026-11-29T10:00:00.250Z").expect("a time");
        assert_eq!(time.0 % 1000, 250);
        assert_eq!(ServerTime::parse(&time.to_string()), Some(time));
        assert_eq!(ServerTime::parse("2026-11-29"), None);
        assert_eq!(ServerTime::from_wire(0), None);
        assert_eq!(ServerTime::from_wire(i64::MAX), None);
    }
}
