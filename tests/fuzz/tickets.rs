//! Join tickets: text that somebody has mailed, cut, or made up.

use bcd::identity::Ticket;
use bcd::model::ServerTime;
use data_encoding::BASE64URL_NOPAD;

use crate::grammar::{Body, Format, parse};
use crate::harness::Target;

const BUILT: ServerTime = ServerTime(1_780_000_000_000);
/// What a ticket may hold.
const FIELDS: [&str; 12] = [
    "v",
    "trust_domain",
    "endpoints",
    "gateway_ca_sha256",
    "join_encryption_key",
    "join_signing_key",
    "token",
    "uses",
    "expires_at",
    "site",
    "labels",
    "attestors",
];

/// A ticket of this JSON.
pub fn line(json: &[u8]) -> String {
    format!("bcd1.{}", BASE64URL_NOPAD.encode(json))
}

/// A line, or the JSON of one: a change of the line alone seldom leaves JSON behind it.
fn check(bytes: &[u8]) -> bool {
    let text =
        if bytes.starts_with(b"{") { line(bytes) } else { String::from_utf8_lossy(bytes).into_owned() };
    let ticket = match Ticket::parse(&text, BUILT) {
        Ok(ticket) => ticket,
        Err(error) => {
            let said = error.to_string();
            assert!(said.len() < 2000 && !said.contains("bt_7Hq"), "{said}");
            return false;
        }
    };
    assert!(!ticket.endpoints.is_empty() && !ticket.trust_domain.is_empty());
    assert!(!ticket.token.reveal().is_empty() && ticket.expires_at > BUILT);
    let json = BASE64URL_NOPAD.decode(text.trim().strip_prefix("bcd1.").expect("a ticket").as_bytes());
    let json = json.expect("base64");
    assert_eq!(line(&json), text.trim(), "one ticket, one text");
    let mut other: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    other["token"] = "another".into();
    let other = Ticket::parse(&line(other.to_string().as_bytes()), BUILT).expect("a ticket");
    assert_eq!(format!("{ticket:?}"), format!("{other:?}"), "a log shows the token");
    let Some(Body::Nodes(members)) = parse(Format::Json, &json) else { panic!("no object") };
    let mut seen = std::collections::BTreeSet::new();
    for member in members {
        let key: String = serde_json::from_slice(&member.head).expect("a key");
        assert!(FIELDS.contains(&&*key), "{key:?} is unknown");
        assert!(seen.insert(key.clone()), "{key:?} is there twice");
        let labels = if key == "labels" { member.body.nodes() } else { &[] };
        let names: std::collections::BTreeSet<_> = labels.iter().map(|label| &label.head).collect();
        assert_eq!(names.len(), labels.len(), "a label is there twice");
    }
    for cut in [1, text.trim().len() / 2, text.trim().len() - 1] {
        // What is cut off may be white space behind the JSON.
        if let Ok(rest) = Ticket::parse(text.trim().get(..cut).unwrap_or_default(), BUILT) {
            assert_eq!(format!("{rest:?}"), format!("{ticket:?}"), "cut at {cut}");
            assert_eq!(rest.token.reveal(), ticket.token.reveal(), "cut at {cut}");
        }
    }
    true
}

#[test]
fn a_ticket_is_taken_only_whole_with_known_fields_and_its_token_is_in_no_message() {
    Target { name: "tickets", format: Format::Json, check, memory: 64 << 10, per_byte: 64 }.run();
}
