//! Join tickets: one line, `bcd1.` and the base64url of a JSON document.

use std::collections::BTreeMap;

use data_encoding::BASE64URL_NOPAD;
use rand::RngCore;
use serde::Serialize;

use super::keys::Pins;
use crate::model::limits::{LABEL_BYTES, LABELS};
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
    /// What they are called.
    pub labels: BTreeMap<String, String>,
}

/// What a ticket may say of its machines; else why not.
pub fn check(Grant { site, labels, .. }: &Grant) -> Result<(), String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if site.is_empty() || site.len() > 64 || !site.bytes().all(plain) {
        return Err(format!("not a site: {site:?} (1 to 64 of A-Z a-z 0-9 . _ -)"));
    }
    if labels.len() > LABELS {
        return Err(format!("{} labels, at most {LABELS}", labels.len()));
    }
    let fits = |text: &str| text.len() <= LABEL_BYTES && text.bytes().all(|b| plain(b) || b == b'/');
    match labels.iter().find(|(name, value)| name.is_empty() || !fits(name) || !fits(value)) {
        Some((name, value)) => {
            Err(format!("not a label: {name}={value} (each at most {LABEL_BYTES} of A-Z a-z 0-9 . _ - /)"))
        }
        None => Ok(()),
    }
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
            labels: grant.labels.clone(),
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
