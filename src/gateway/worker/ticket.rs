//! Join tickets: one line, `bcd1.` and the base64url of a JSON document.

use std::collections::BTreeMap;

use data_encoding::BASE64URL_NOPAD;
use rand::RngCore;
use serde::Serialize;

use crate::model::{Digest, ServerTime};

/// What a ticket's line begins with.
const PREFIX: &str = "bcd1.";

/// A join ticket. The join service's two keys come with the sealed token.
#[derive(Debug, Clone, Serialize)]
pub struct Ticket {
    v: u32,
    trust_domain: String,
    endpoints: Vec<String>,
    gateway_ca_sha256: Digest,
    token: String,
    uses: u32,
    expires_at: ServerTime,
    site: String,
    labels: BTreeMap<String, String>,
    attestors: Vec<String>,
}

/// What the operator chooses about a ticket.
#[derive(Debug, Clone)]
pub struct Grant {
    /// Machines that may use it.
    pub uses: u32,
    /// When it runs out.
    pub expires_at: ServerTime,
    /// Where those machines stand.
    pub site: String,
}

impl Ticket {
    /// A ticket with a new random token. The token leaves only with the ticket; the gateway keeps its digest.
    pub fn new(
        grant: &Grant,
        trust_domain: &str,
        endpoints: &[String],
        ca: Digest,
        rng: &mut impl RngCore,
    ) -> Self {
        let mut random = [0_u8; 24];
        rng.fill_bytes(&mut random);
        Self {
            v: 1,
            trust_domain: trust_domain.to_owned(),
            endpoints: endpoints.to_vec(),
            gateway_ca_sha256: ca,
            token: format!("bt_{}", BASE64URL_NOPAD.encode(&random)),
            uses: grant.uses,
            expires_at: grant.expires_at,
            site: grant.site.clone(),
            labels: BTreeMap::new(),
            attestors: vec!["token".into()],
        }
    }

    /// What the gateway knows the token by.
    pub fn token_sha256(&self) -> Digest {
        Digest::of(self.token.as_bytes())
    }

    /// The one line, without its end.
    pub fn line(&self) -> String {
        let json = serde_json::to_vec(self).unwrap_or_default();
        format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&json))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn a_ticket_is_one_line_that_reads_back() {
        let grant = Grant { uses: 3, expires_at: ServerTime(1_800_000_000_000), site: "fra1".into() };
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let endpoints = ["127.0.0.1:7443".to_owned()];
        let ticket = Ticket::new(&grant, "lab.example", &endpoints, Digest([7; 32]), &mut rng);
        let line = ticket.line();
        assert!(!line.contains(['\n', '=', ' ']));
        let json = BASE64URL_NOPAD.decode(line.strip_prefix(PREFIX).expect("prefix").as_bytes());
        let value: serde_json::Value = serde_json::from_slice(&json.expect("base64")).expect("json");
        assert_eq!(value["uses"], 3);
        assert_eq!(value["gateway_ca_sha256"], "07".repeat(32));
        assert_eq!(value["expires_at"], "2027-01-15T08:00:00Z");
        let token = value["token"].as_str().expect("a token");
        assert_eq!(Digest::of(token.as_bytes()), ticket.token_sha256());
    }

    #[test]
    fn two_tickets_have_two_tokens() {
        let grant = Grant { uses: 1, expires_at: ServerTime(1), site: "x".into() };
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let mut ticket = || Ticket::new(&grant, "lab", &[], Digest([7; 32]), &mut rng);
        assert_ne!(ticket().token, ticket().token);
    }
}
