//! TLS for the node's side: 1.3 only, no system roots, no resumption, the server judged by the working clock.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, UnixTime};

use crate::model::Digest;

/// What a gateway's certificate is held against.
#[derive(Debug, Clone)]
pub enum Roots {
    /// The SHA-256 of the DER of the CA certificate, which the server sends with its chain (a join ticket's pin).
    Pinned(Digest),
    /// CA certificates held by this node.
    Certificates(Vec<CertificateDer<'static>>),
}

/// The time that certificates are judged by.
pub trait JudgeTime: Send + Sync + std::fmt::Debug {
    /// The time, and whether it is server time. Without server time notBefore is not judged and notAfter only
    /// against this floor (the later of build time and mark).
    fn now(&self) -> (UnixTime, bool);
}

/// A client configuration for one identity. `client` is absent for a join.
///
/// # Errors
/// The roots cannot be used.
pub fn client_config(
    _roots: &Roots,
    _client: Option<Arc<rustls::sign::CertifiedKey>>,
    _time: Arc<dyn JudgeTime>,
) -> Result<rustls::ClientConfig, rustls::Error> {
    todo!()
}
