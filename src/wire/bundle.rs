//! The trust bundle: whom a node believes, signed by the join-signing key that was pinned at its join.

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use super::der::Der;
use super::dsse::{
    BadRoot, CommandRoots, Document, DocumentError, Envelope, PublicKey, Verified, verify_document,
};
use super::link::{BadEndpoint, Endpoint};
use crate::model::{Digest, NodeId, ServerTime, strict};

/// Certificates, keys or endpoints of one list.
pub const LIST: usize = 64;

/// A bundle's body. A list that is absent is empty, and what is empty vouches for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustBundle {
    /// The deployment's name.
    pub trust_domain: String,
    /// Rises with each bundle; from 1.
    pub version: u64,
    /// When it was signed.
    pub issued_at: ServerTime,
    /// Gateways, `host:port`; bcd.toml's, where set, win.
    pub endpoints: Vec<String>,
    /// CAs that sign nodes.
    #[serde(default)]
    pub node_roots: Vec<Der>,
    /// CAs that sign gateways.
    pub gateway_roots: Vec<Der>,
    /// CAs that sign workers.
    #[serde(default)]
    pub command_roots: Vec<Der>,
    /// Signs secrets.
    #[serde(default)]
    pub broker_key: Option<PublicKey>,
    /// Sign releases.
    #[serde(default)]
    pub release_keys: Vec<PublicKey>,
    /// Who must agree to what needs approval.
    #[serde(default, deserialize_with = "strict::optional")]
    pub approvers: Option<Approvers>,
}

/// The approver set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approvers {
    /// Rises with each set.
    pub epoch: u64,
    /// Distinct keys that must sign.
    pub quorum: u32,
    /// Who may.
    pub keys: Vec<PublicKey>,
}

impl Document for TrustBundle {
    const TYPE: &'static str = "application/vnd.bcd.v1.trust-bundle";

    fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    fn node_id(&self) -> Option<&NodeId> {
        None
    }
}

/// A bundle that holds, ready for use.
#[derive(Debug, Clone)]
pub struct Trust {
    /// What of it is kept: its payload as received, and the signature that holds.
    pub envelope: Envelope,
    /// SHA-256 of its payload.
    pub sha256: Digest,
    /// What it says.
    pub bundle: TrustBundle,
    /// Where gateways are; at least one.
    pub endpoints: Vec<Endpoint>,
    /// Who may sign commands.
    pub command_roots: CommandRoots,
}

/// Why a bundle is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// Signature, type or body.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// Version 0.
    #[error("its version is 0")]
    Version,
    /// Not newer than the one held.
    #[error("its version {offered} is not above {held}, the one that is held")]
    NotNewer {
        /// The bundle's.
        offered: u64,
        /// Ours.
        held: u64,
    },
    /// A list that is too long.
    #[error("its list of {0} has over {LIST} entries")]
    TooMany(&'static str),
    /// With it, no gateway could be trusted again.
    #[error("it would leave this node without {0}")]
    Without(&'static str),
    /// An endpoint that is none.
    #[error("an endpoint of it is none")]
    Endpoint(#[from] BadEndpoint),
    /// A root that is no CA.
    #[error(transparent)]
    Root(#[from] BadRoot),
    /// A quorum that nobody, or everybody alone, reaches.
    #[error("its approver set asks for {quorum} of {keys} keys")]
    Quorum {
        /// Asked for.
        quorum: u32,
        /// There.
        keys: usize,
    },
}

impl Trust {
    /// Takes a bundle of the deployment `trust_domain` under the pinned key.
    ///
    /// # Errors
    /// See [`BundleError`].
    pub fn verify(
        envelope: Envelope,
        join_signing_key: &PublicKey,
        trust_domain: &str,
    ) -> Result<Self, BundleError> {
        let verified: Verified<TrustBundle> = verify_document(&envelope, join_signing_key, None)?;
        let bundle = verified.into_inner();
        if bundle.trust_domain != trust_domain {
            let shown: String = bundle.trust_domain.chars().take(80).collect();
            let detail = format!("the body is for the trust domain {shown:?}");
            return Err(DocumentError::Audience(detail).into());
        }
        if bundle.version == 0 {
            return Err(BundleError::Version);
        }
        let lists = [
            ("node roots", bundle.node_roots.len()),
            ("gateway roots", bundle.gateway_roots.len()),
            ("command roots", bundle.command_roots.len()),
            ("endpoints", bundle.endpoints.len()),
            ("release keys", bundle.release_keys.len()),
            ("approver keys", bundle.approvers.as_ref().map_or(0, |set| set.keys.len())),
        ];
        if let Some((name, _)) = lists.into_iter().find(|(_, count)| *count > LIST) {
            return Err(BundleError::TooMany(name));
        }
        // A root that no certificate can be read from is none.
        let gateways = CommandRoots::new(bundle.gateway_roots.iter().map(|der| &*der.0))?;
        if gateways.is_empty() {
            return Err(BundleError::Without("gateway roots"));
        }
        if bundle.endpoints.is_empty() {
            return Err(BundleError::Without("gateway endpoints"));
        }
        if let Some(Approvers { quorum, keys, .. }) = &bundle.approvers
            && (*quorum == 0 || keys.len() < usize::try_from(*quorum).unwrap_or(usize::MAX))
        {
            return Err(BundleError::Quorum { quorum: *quorum, keys: keys.len() });
        }
        let endpoints = bundle.endpoints.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        let command_roots = CommandRoots::new(bundle.command_roots.iter().map(|der| &*der.0))?;
        let envelope = envelope.as_signed_by(join_signing_key);
        Ok(Self { sha256: Digest::of(&envelope.payload), envelope, bundle, endpoints, command_roots })
    }

    /// CAs that sign gateways.
    pub fn gateway_roots(&self) -> Vec<CertificateDer<'static>> {
        let roots = self.bundle.gateway_roots.iter();
        roots.map(|root| CertificateDer::from(root.0.to_vec())).collect()
    }

    /// Whether it may take the place of `held`.
    ///
    /// # Errors
    /// It is not newer.
    pub fn newer_than(self, held: &Self) -> Result<Self, BundleError> {
        let (offered, held) = (self.bundle.version, held.bundle.version);
        if offered > held { Ok(self) } else { Err(BundleError::NotNewer { offered, held }) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::KeyPair;
    use rustls::sign::SigningKey;

    use super::*;
    use crate::wire::dsse::{sign, signing_key};

    struct Signer(Arc<dyn SigningKey>, PublicKey);

    fn signer() -> Signer {
        let key = signing_key(KeyPair::generate().unwrap().serialize_der()).unwrap();
        let public = PublicKey::from_spki(&key.public_key().unwrap()).unwrap();
        Signer(key, public)
    }

    fn root() -> Der {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        (&**der.der()).into()
    }

    fn bundle() -> TrustBundle {
        TrustBundle {
            trust_domain: "lab.example".into(),
            version: 3,
            issued_at: ServerTime(1),
            endpoints: vec!["gw1:443".into()],
            node_roots: Vec::new(),
            gateway_roots: vec![root()],
            command_roots: vec![root()],
            broker_key: None,
            release_keys: vec![signer().1],
            approvers: None,
        }
    }

    fn judged(signer: &Signer, bundle: &TrustBundle) -> Result<Trust, BundleError> {
        let body = serde_json::to_vec(bundle).unwrap();
        let envelope = sign(TrustBundle::TYPE, body, &*signer.0, Vec::new()).unwrap();
        Trust::verify(envelope, &signer.1, "lab.example")
    }

    #[test]
    fn a_bundle_of_the_pinned_key_is_taken_only_when_it_is_newer() {
        let signer = signer();
        let held = judged(&signer, &bundle()).unwrap();
        let version = |version| judged(&signer, &TrustBundle { version, ..bundle() }).unwrap();
        assert!(version(4).newer_than(&held).is_ok());
        for offered in [2, 3] {
            let refused = version(offered).newer_than(&held).unwrap_err();
            assert_eq!(refused, BundleError::NotNewer { offered, held: 3 });
        }
    }

    #[test]
    fn a_bundle_that_would_leave_the_node_without_gateways_or_is_out_of_shape_is_refused() {
        let signer = signer();
        let quorum = |quorum| Some(Approvers { epoch: 1, quorum, keys: vec![self::signer().1] });
        let cases: [(&str, TrustBundle); 9] = [
            ("no gateway roots", TrustBundle { gateway_roots: Vec::new(), ..bundle() }),
            ("no endpoints", TrustBundle { endpoints: Vec::new(), ..bundle() }),
            ("an endpoint that is none", TrustBundle { endpoints: vec!["gw1".into()], ..bundle() }),
            ("another domain", TrustBundle { trust_domain: "evil.example".into(), ..bundle() }),
            ("version 0", TrustBundle { version: 0, ..bundle() }),
            ("a root that is none", TrustBundle { gateway_roots: vec![(&[1_u8][..]).into()], ..bundle() }),
            (
                "a command root that is none",
                TrustBundle { command_roots: vec![(&[1_u8][..]).into()], ..bundle() },
            ),
            ("a quorum of nobody", TrustBundle { approvers: quorum(0), ..bundle() }),
            ("a quorum of more than all", TrustBundle { approvers: quorum(2), ..bundle() }),
        ];
        for (what, bundle) in cases {
            assert!(judged(&signer, &bundle).is_err(), "{what}");
        }
        let many = TrustBundle { command_roots: vec![root(); LIST + 1], ..bundle() };
        assert_eq!(judged(&signer, &many).unwrap_err(), BundleError::TooMany("command roots"));
    }
}
