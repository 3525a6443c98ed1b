//! A join ticket: one line that carries everything that a join pins. It is read strictly, from a file or standard
//! input, never from the command line, where every user of the machine could read it.

use std::fmt;

use serde::Deserialize;

use crate::model::strict::{self, StrictError, StrictMap};
use crate::model::{Digest, ServerTime, limits};
use crate::wire::dsse::PublicKey;
use crate::wire::enroll::SealingKey;
use crate::wire::link::{BadEndpoint, Endpoint};

/// What stands before the ticket's JSON; the digit is the format's version.
const PREFIX: &str = "bcd1.";

/// A token that stays out of every log.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// The secret itself, for the wire.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Tells two tokens apart without keeping either.
    pub fn digest(&self) -> Digest {
        Digest::of(self.0.as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A ticket, read.
#[derive(Debug, Clone)]
pub struct Ticket {
    /// The deployment's name.
    pub trust_domain: String,
    /// Where to dial; at least one.
    pub endpoints: Vec<Endpoint>,
    /// SHA-256 of the DER of the CA certificate that the gateways' certificates chain to.
    pub gateway_ca_sha256: Digest,
    /// Who signs the answer to the join, and the trust bundles after it.
    pub join_signing_key: PublicKey,
    /// Whom the token is sealed to.
    pub join_encryption_key: SealingKey,
    /// The right to join.
    pub token: Token,
    /// Machines that may use it; absent: it does not say.
    pub uses: Option<u32>,
    /// When it runs out, by the control plane's clock.
    pub expires_at: ServerTime,
}

/// Why a text is not a ticket that this build can use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Nothing but white space.
    #[error("the ticket is empty; ask the control plane for a new one and store it whole")]
    Empty,
    /// Longer than any ticket.
    #[error(
        "the ticket is longer than {} bytes, so it is none; give the file that holds the one line bcd1.…",
        limits::TICKET_BYTES
    )]
    TooLong,
    /// Another text altogether.
    #[error("this is not a join ticket: a ticket is one line that begins with bcd1.")]
    NotATicket,
    /// A ticket of another format.
    #[error(
        "the ticket has format version {0}, this bcd reads version 1; install a newer bcd, or ask for a ticket of version 1"
    )]
    Version(String),
    /// Its end is missing.
    #[error("the ticket is cut short after {0} bytes; copy the whole line and try again")]
    CutShort(usize),
    /// Its characters are not those of a ticket.
    #[error("the ticket is damaged: {0}; copy it again")]
    Damaged(String),
    /// A field that this build does not know.
    #[error("the ticket has the field {0:?}, which this bcd does not know; install a newer bcd")]
    UnknownField(String),
    /// It names no gateway.
    #[error("the ticket names no gateway endpoint; ask the control plane for a new one")]
    NoEndpoint,
    /// It names something that is no gateway.
    #[error("the ticket's endpoints cannot be used")]
    Endpoint(#[from] BadEndpoint),
    /// It ran out before this program was built, whatever any clock says.
    #[error("the ticket ran out at {0}; ask the control plane for a new one")]
    LongPast(ServerTime),
}

#[derive(Deserialize)]
struct Versioned {
    v: u64,
}

/// The ticket's JSON. What this build has no use for yet is known all the same: tickets are read strictly.
#[derive(Deserialize)]
struct Body {
    #[serde(rename = "v")]
    _version: u64,
    trust_domain: String,
    endpoints: Vec<String>,
    gateway_ca_sha256: Digest,
    join_encryption_key: SealingKey,
    join_signing_key: PublicKey,
    token: Token,
    #[serde(default)]
    uses: Option<u32>,
    expires_at: ServerTime,
    #[serde(rename = "site", default)]
    _site: Option<String>,
    #[serde(rename = "labels", default)]
    _labels: StrictMap<String>,
    #[serde(rename = "attestors", default)]
    _attestors: Vec<String>,
}

impl Ticket {
    /// Reads a ticket. `built` is the time of this program's build: a ticket that had run out by then is refused
    /// here, every other one is the gateway's to judge, since the local clock may be wrong.
    ///
    /// # Errors
    /// See [`TicketError`].
    pub fn parse(text: &str, built: ServerTime) -> Result<Self, TicketError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TicketError::Empty);
        }
        if text.len() > limits::TICKET_BYTES {
            return Err(TicketError::TooLong);
        }
        let Some(encoded) = text.strip_prefix(PREFIX) else { return Err(not_a_ticket(text)) };
        let body = decode(encoded, text.len())?;
        if body.endpoints.is_empty() {
            return Err(TicketError::NoEndpoint);
        }
        if body.token.0.is_empty() || body.trust_domain.is_empty() {
            return Err(TicketError::Damaged("an empty token or trust domain".into()));
        }
        if body.expires_at <= built {
            return Err(TicketError::LongPast(body.expires_at));
        }
        Ok(Self {
            trust_domain: body.trust_domain,
            endpoints: body.endpoints.iter().map(|text| text.parse()).collect::<Result<_, _>>()?,
            gateway_ca_sha256: body.gateway_ca_sha256,
            join_signing_key: body.join_signing_key,
            join_encryption_key: body.join_encryption_key,
            token: body.token,
            uses: body.uses,
            expires_at: body.expires_at,
        })
    }
}

fn not_a_ticket(text: &str) -> TicketError {
    if PREFIX.starts_with(text) {
        return TicketError::CutShort(text.len());
    }
    let version = text.strip_prefix("bcd").and_then(|rest| rest.split_once('.')).map(|(version, _)| version);
    match version {
        Some(version) if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) => {
            TicketError::Version(version.chars().take(10).collect())
        }
        _ => TicketError::NotATicket,
    }
}

fn decode(encoded: &str, length: usize) -> Result<Body, TicketError> {
    use data_encoding::{BASE64URL_NOPAD, DecodeKind};
    let cut = TicketError::CutShort(length);
    let json = match BASE64URL_NOPAD.decode(encoded.as_bytes()) {
        Ok(json) => json,
        // A cut within a group of four leaves an impossible length, or bits that belong to the next byte.
        Err(error) if matches!(error.kind, DecodeKind::Length | DecodeKind::Trailing) => return Err(cut),
        Err(error) => return Err(TicketError::Damaged(error.to_string())),
    };
    match serde_json::from_slice::<Versioned>(&json) {
        Ok(Versioned { v: 1 }) => {}
        Ok(Versioned { v }) => return Err(TicketError::Version(v.to_string())),
        Err(error) if error.is_eof() => return Err(cut),
        Err(error) => return Err(TicketError::Damaged(without_values(&error.to_string()))),
    }
    strict::parse(&json).map_err(|error| match error {
        StrictError::UnsupportedField(field) => TicketError::UnknownField(field),
        StrictError::Invalid(detail) => TicketError::Damaged(without_values(&detail)),
    })
}

/// serde's words, but for values: any of them may be the token, in the wrong place.
fn without_values(detail: &str) -> String {
    if ["missing field `", "duplicate field `"].iter().any(|fields| detail.starts_with(fields)) {
        return detail.to_owned();
    }
    let place = detail.rsplit_once(" at line ").and_then(|(_, place)| place.split_once(" column "));
    match place.map(|(line, column)| (line.parse::<u32>(), column.parse::<u32>())) {
        Some((Ok(line), Ok(column))) => format!("it is no ticket's JSON at line {line} column {column}"),
        _ => "it is no ticket's JSON".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT: ServerTime = ServerTime(1_790_000_000_000);

    fn line(json: &str) -> String {
        format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(json.as_bytes()))
    }

    fn json(v: u32, extra: &str, expires: &str) -> String {
        format!(
            r#"{{"v":{v},"trust_domain":"lab.example","endpoints":["gw1.lab.example:443","[::1]:7443"],
            "gateway_ca_sha256":"{}","join_signing_key":"{SIGNS}","join_encryption_key":"{SEALS}","token":"bt_7Hq","uses":1,"expires_at":"{expires}","site":"fra1",
            "labels":{{"rack":"r12"}},"attestors":["token"]{extra}}}"#,
            "9f".repeat(32)
        )
    }

    const SIGNS: &str = "p256:MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpZP40Li_hp_m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q";
    const SEALS: &str = "x25519:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI";
    const LATER: &str = "2036-12-01T12:00:00Z";

    fn parse(text: &str) -> Result<Ticket, TicketError> {
        Ticket::parse(text, BUILT)
    }

    #[test]
    fn a_ticket_is_read_and_one_without_the_join_services_keys_is_not() {
        let ticket = parse(&format!("{}\n", line(&json(1, "", LATER)))).unwrap();
        assert_eq!(ticket.endpoints[1].port, 7443);
        assert!(!format!("{ticket:?}").contains("bt_7Hq"), "the token stays out of logs");
        for (key, value) in [("join_signing_key", SIGNS), ("join_encryption_key", SEALS)] {
            let without = json(1, "", LATER).replace(&format!(r#""{key}":"{value}","#), "");
            let refused = parse(&line(&without)).unwrap_err();
            assert!(refused.to_string().contains(key), "{refused}");
        }
    }

    #[test]
    fn a_ticket_cut_short_is_refused_wherever_it_was_cut() {
        let whole = line(&json(1, "", LATER));
        for length in 1..whole.len() {
            let cut = parse(&whole[..length]).unwrap_err();
            assert_eq!(cut, TicketError::CutShort(length));
        }
    }

    #[test]
    fn what_is_not_a_ticket_says_so() {
        assert_eq!(parse(" \n").unwrap_err(), TicketError::Empty);
        assert_eq!(parse("hello").unwrap_err(), TicketError::NotATicket);
        assert_eq!(parse("bcd.toml").unwrap_err(), TicketError::NotATicket);
        assert_eq!(parse(&"x".repeat(limits::TICKET_BYTES + 1)).unwrap_err(), TicketError::TooLong);
        assert!(matches!(parse("bcd1.!!!!").unwrap_err(), TicketError::Damaged(_)));
        assert!(matches!(parse(&line(r#"{"v":1}"#)).unwrap_err(), TicketError::Damaged(_)));
    }

    #[test]
    fn a_ticket_of_another_version_names_it() {
        assert_eq!(parse("bcd2.AAAA").unwrap_err(), TicketError::Version("2".into()));
        assert_eq!(parse(&line(&json(3, "", LATER))).unwrap_err(), TicketError::Version("3".into()));
    }

    #[test]
    fn an_unknown_or_doubled_field_is_refused() {
        let unknown = parse(&line(&json(1, r#","proxy":"x""#, LATER))).unwrap_err();
        assert_eq!(unknown, TicketError::UnknownField("proxy".into()));
        let doubled = parse(&line(&json(1, r#","site":"ams1""#, LATER))).unwrap_err();
        assert!(matches!(doubled, TicketError::Damaged(_)), "{doubled}");
    }

    #[test]
    fn a_damaged_ticket_shows_no_token_wherever_that_stands_and_still_says_which_field_is_missing() {
        let whole: serde_json::Value = serde_json::from_str(&json(1, "", LATER)).unwrap();
        for field in whole.as_object().unwrap().keys().filter(|field| *field != "token") {
            for wrong in [
                serde_json::json!("bt_7Hq"),
                serde_json::json!(["bt_7Hq"]),
                serde_json::json!({"a": "bt_7Hq"}),
            ] {
                let mut body = whole.clone();
                body[field] = wrong;
                if let Err(error) = parse(&line(&body.to_string())) {
                    assert!(!error.to_string().contains("bt_7Hq"), "{field}: {error}");
                }
            }
            let mut body = whole.clone();
            body.as_object_mut().unwrap().remove(field);
            let needed = !matches!(&**field, "v" | "uses" | "site" | "labels" | "attestors");
            let missing = TicketError::Damaged(format!("missing field `{field}`"));
            let said = parse(&line(&body.to_string())).err().map(|error| error.to_string());
            assert!(
                !needed || said.clone().is_some_and(|said| said.starts_with(&missing.to_string()[..40])),
                "{said:?}"
            );
        }
    }

    #[test]
    fn a_ticket_that_ran_out_before_the_build_is_refused_at_once() {
        let past = parse(&line(&json(1, "", "2020-01-01T00:00:00Z"))).unwrap_err();
        assert!(matches!(past, TicketError::LongPast(_)));
    }
}
