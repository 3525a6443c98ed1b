//! What certificates are read for beside their chain: the URIs that name whoever holds them.

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Reads a certificate, DER; None where it is none, or not the whole of the bytes.
pub fn read(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    rest.is_empty().then_some(certificate)
}

/// The URIs among its alternative names; None where those cannot be read.
pub fn uris<'a>(certificate: &'a X509Certificate<'_>) -> Option<Vec<&'a str>> {
    let names = certificate.subject_alternative_name().ok()?;
    let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    let uri = |name: &'a GeneralName<'_>| if let GeneralName::URI(uri) = name { Some(*uri) } else { None };
    Some(names.iter().filter_map(uri).collect())
}
