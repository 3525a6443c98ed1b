//! What a gateway that was taken over can make with keys of its own: everything but a signature that a node believes.

use std::sync::Arc;

use bytes::Bytes;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::sign::SigningKey;
use serde::Serialize;
use serde_json::{Value, json};

use super::body::{self, CancelBody};
use super::lies::FORGED_VERSION;
use crate::model::{CommandId, Digest, NodeId, ServerTime};
use crate::wire::bundle::TrustBundle;
use crate::wire::dsse::{CANCEL_TYPE, COMMAND_TYPE, Document, Envelope, SignError, sign, signing_key};
use crate::wire::enroll::{Issued, RenewAnswer};
use crate::wire::pb;
use crate::wire::revocation::Revocation;

/// A forged command holds as long as a true one, ms.
const LIFE_MS: i64 = 60_000;
/// The true worker's name: a forger knows it.
const WORKER: &str = "urn:bc:worker:reference";

/// Why there is no forger.
#[derive(Debug, thiserror::Error)]
pub enum ForgerError {
    /// A key or certificate.
    #[error("a forger's key or certificate cannot be made")]
    Certificate(#[from] rcgen::Error),
    /// The key does not sign.
    #[error("a forger's key cannot be used")]
    Sign(#[from] SignError),
}

/// Keys that nobody has vouched for: a root of its own, and a worker's certificate under it.
pub struct Forger {
    trust_domain: String,
    root: Bytes,
    leaf: Bytes,
    key: Arc<dyn SigningKey>,
}

/// How a forged command is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    /// Not at all.
    Not,
    /// By the forger.
    ByForger,
    /// With the signature of what it was made from.
    AsBefore,
}

impl Forger {
    /// Makes its keys.
    ///
    /// # Errors
    /// See [`ForgerError`].
    pub fn new(trust_domain: String) -> Result<Self, ForgerError> {
        let root_pair = KeyPair::generate()?;
        let mut root_params = CertificateParams::default();
        root_params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let root = root_params.self_signed(&root_pair)?;
        let pair = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(WORKER.try_into()?)];
        let leaf = params.signed_by(&pair, &Issuer::from_ca_cert_der(root.der(), root_pair)?)?;
        Ok(Self {
            trust_domain,
            root: Bytes::copy_from_slice(root.der()),
            leaf: Bytes::copy_from_slice(leaf.der()),
            key: signing_key(pair.serialize_der())?,
        })
    }

    /// A command like `original`, whose id is `was`, under another id and dated now: as an honest node would run it.
    pub fn command(
        &self,
        (original, was): (&pb::Envelope, &CommandId),
        id: &CommandId,
        now: ServerTime,
        signed: Signed,
    ) -> Option<pb::Envelope> {
        // Also where it stands among the arguments: what such a program leaves behind names the forgery.
        let text = std::str::from_utf8(&original.payload).ok()?.replace(was.as_str(), id.as_str());
        let mut forged: Value = serde_json::from_str(&text).ok()?;
        forged["issued_at"] = json!(now);
        forged["not_after"] = json!(ServerTime(now.0.saturating_add(LIFE_MS)));
        let payload = Bytes::from(forged.to_string());
        if signed == Signed::ByForger {
            return self.signed(COMMAND_TYPE, payload, true);
        }
        let signatures = match signed {
            Signed::AsBefore => original.signatures.clone(),
            Signed::Not | Signed::ByForger => Vec::new(),
        };
        Some(pb::Envelope { payload_type: COMMAND_TYPE.into(), payload, signatures })
    }

    /// A cancellation.
    pub fn cancel(&self, node: &NodeId, id: &CommandId, now: ServerTime) -> Option<pb::Envelope> {
        let trust_domain = &self.trust_domain;
        let body = CancelBody { trust_domain, node_id: node, command_id: id, issued_at: now };
        self.signed(CANCEL_TYPE, body::text(&body).into(), true)
    }

    /// A trust bundle by which the forger could command, and answer for the gateways.
    pub fn bundle(&self, now: ServerTime) -> Option<pb::Envelope> {
        let root = || vec![self.root.as_ref().into()];
        self.document(&TrustBundle {
            trust_domain: self.trust_domain.clone(),
            version: FORGED_VERSION,
            issued_at: now,
            endpoints: vec!["127.0.0.1:9".into()],
            node_roots: root(),
            gateway_roots: root(),
            command_roots: root(),
            broker_key: None,
            release_keys: Vec::new(),
            approvers: None,
        })
    }

    /// A revocation of this certificate.
    pub fn revocation(&self, node: &NodeId, serial: &str, now: ServerTime) -> Option<pb::Envelope> {
        self.document(&Revocation {
            trust_domain: self.trust_domain.clone(),
            node_id: node.clone(),
            serials: vec![serial.to_owned()],
            issued_at: now,
        })
    }

    /// An answer to a renewal that says what the true one does, beside a trust bundle of its own.
    pub fn renewal(&self, truth: &pb::RenewResponse, now: ServerTime) -> Option<pb::RenewResponse> {
        let bundle = self.bundle(now)?;
        let mut issued: Issued = serde_json::from_slice(&truth.signed_response.as_ref()?.payload).ok()?;
        issued.trust_bundle_sha256 = Digest::of(&bundle.payload);
        let signed_response = self.document(&RenewAnswer(issued))?;
        Some(pb::RenewResponse { signed_response: Some(signed_response), trust_bundle: Some(bundle) })
    }

    fn document<T: Document + Serialize>(&self, document: &T) -> Option<pb::Envelope> {
        self.signed(T::TYPE, body::text(document).into(), false)
    }

    fn signed(&self, payload_type: &str, payload: Bytes, as_worker: bool) -> Option<pb::Envelope> {
        let chain = if as_worker { vec![self.leaf.clone()] } else { Vec::new() };
        match sign(payload_type, payload, &*self.key, chain) {
            Ok(envelope) => Some(Envelope::into(envelope)),
            Err(error) => {
                tracing::error!(%error, "a forgery cannot be signed");
                None
            }
        }
    }
}
