//! Join tickets: one line, `bcd1.` and the base64url of a JSON document.

use std::collections::BTreeMap;

use data_encoding::BASE64URL_NOPAD;
use rand::RngCore;
use serde::Serialize;

use super::keys::Pins;
use crate::model::{Digest, ServerTime};
use crate::wire::dsse::PublicKey;
use crate::wire::enroll::SealingKey;

/// What a ticket's line begins with.
const PREFIX: &str = "bcd1.";

/// A join ticket.
#[derive(Debug, Clone, Serialize)]
pub struct Ticket {
    v: u32,
    trust_domain: String,
    endpoints: Vec<String>,
    gateway_ca_sha256: Digest,
    join_signing_key: PublicKey,
    join_encryption_key: SealingKey,
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
    /// A ticket with a new random token. The token leaves only with the ticket; its digest is kept.
    pub fn new(
        grant: &Grant,
        trust_domain: &str,
        endpoints: &[String],
        pins: &Pins,
        rng: &mut impl RngCore,
    ) -> Self {
        let mut random = [0_u8; 24];
        rng.fill_bytes(&mut random);
        Self {
            v: 1,
            trust_domain: trust_domain.to_owned(),
            endpoints: endpoints.to_vec(),
            gateway_ca_sha256: pins.gateway_ca,
            join_signing_key: pins.join_signing_key.clone(),
            join_encryption_key: pins.join_encryption_key,
            token: format!("bt_{}", BASE64URL_NOPAD.encode(&random)),
            uses: grant.uses,
            expires_at: grant.expires_at,
            site: grant.site.clone(),
            labels: BTreeMap::new(),
            attestors: vec!["token".into()],
        }
    }

    /// What the join service knows the token by.
    pub fn token_sha256(&self) -> Digest {
        Digest::of(self.token.as_bytes())
    }

    /// The one line, without its end.
    pub fn line(&self) -> String {
        let json = serde_json::to_vec(self).unwrap_or_default();
        format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&json))
    }
}
