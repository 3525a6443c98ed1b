//! Who is at the other end, by the certificate that TLS has verified up to its expiry.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

use crate::model::{NodeId, Role, ServerTime};
use crate::wire::x509;

/// A node certificate's facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// From the spiffe name.
    pub node: NodeId,
    /// From `urn:bc:role`.
    pub role: Role,
    /// Hex.
    pub serial: String,
    /// When it runs out; judged by the service, so that the node can be told.
    pub not_after: ServerTime,
}

/// Why a certificate names no node of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate names no node of trust domain {trust_domain}: {what}")]
pub struct BadPeer {
    trust_domain: String,
    what: &'static str,
}

impl Peer {
    /// Reads a leaf.
    ///
    /// # Errors
    /// The leaf has not exactly one spiffe name of this trust domain's form and one role: nothing is taken that the node
    /// itself would not read as its own.
    pub fn read(leaf: &CertificateDer<'_>, trust_domain: &str) -> Result<Self, BadPeer> {
        let bad = |what| BadPeer { trust_domain: trust_domain.to_owned(), what };
        let (certificate, _) = x509::read(leaf).ok_or_else(|| bad("it cannot be read"))?;
        let names = certificate
            .subject_alternative_name()
            .map_err(|_| bad("its names cannot be read"))?
            .ok_or_else(|| bad("it has no names"))?;
        let (mut node, mut role, mut attested) = (None, None, false);
        for name in &names.value.general_names {
            let GeneralName::URI(uri) = name else { return Err(bad("it has a name that is no URI")) };
            if uri.starts_with("spiffe://") {
                if node.is_some() {
                    return Err(bad("it has two spiffe names"));
                }
                node =
                    Some(spiffe_node(uri, trust_domain).ok_or_else(|| bad("its spiffe name is another's"))?);
            } else if let Some(name) = uri.strip_prefix("urn:bc:role:") {
                if role.is_some() {
                    return Err(bad("it has two roles"));
                }
                role = Some(Role::from_name(name).ok_or_else(|| bad("its role is unknown"))?);
            } else if uri.starts_with("urn:bc:tpm-ak:") && std::mem::replace(&mut attested, true) {
                return Err(bad("it names two attestation keys"));
            }
        }
        let not_after = certificate.validity().not_after.timestamp().saturating_mul(1000);
        Ok(Self {
            node: node.ok_or_else(|| bad("it has no spiffe name"))?,
            role: role.ok_or_else(|| bad("it has no role"))?,
            serial: data_encoding::HEXLOWER.encode(certificate.raw_serial()),
            not_after: ServerTime(not_after),
        })
    }
}

fn spiffe_node(uri: &str, trust_domain: &str) -> Option<NodeId> {
    let path = uri.strip_prefix("spiffe://")?.strip_prefix(trust_domain)?.strip_prefix("/node/")?;
    let (site, id) = path.split_once('/')?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if !(1..=255).contains(&site.len()) || !site.bytes().all(plain) {
        return None;
    }
    NodeId::new(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spiffe_name_is_read_only_in_this_trust_domain_and_form() {
        let id = |uri| spiffe_node(uri, "lab.example").map(String::from);
        assert_eq!(id("spiffe://lab.example/node/fra1/n-1").as_deref(), Some("n-1"));
        for other in [
            "spiffe://lab.example.org/node/fra1/n-1",
            "spiffe://other/node/fra1/n-1",
            "spiffe://lab.example/node//n-1",
            "spiffe://lab.example/node/fra 1/n-1",
            "spiffe://lab.example/node/fra1/",
            "spiffe://lab.example/node/fra1/n-1/x",
            "spiffe://lab.example/worker/fra1/n-1",
        ] {
            assert_eq!(id(other), None, "{other}");
        }
    }
}
