//! What certificates are read for beside their chain: the URIs that name whoever holds them.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Reads a certificate, DER, and the URIs among its alternative names; None where it is none, or not the whole of the bytes, or where the library that verifies chains
/// reads another key, serial or URI in it: one of them may pass over what the other one takes, such as a name whose tag says
/// that it is a list.
pub fn read(der: &[u8]) -> Option<(X509Certificate<'_>, Vec<&str>)> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    let whole = CertificateDer::from(der);
    let verified = EndEntityCert::try_from(&whole).ok()?;
    let uris = uris(&certificate)?;
    let same = *verified.subject_public_key_info() == *certificate.public_key().raw
        && verified.serial() == certificate.raw_serial()
        && uris.iter().copied().eq(verified.valid_uri_names());
    (rest.is_empty() && same).then_some((certificate, uris))
}

/// The URIs among its alternative names; None where those cannot be read, or one of them: what it would say must not be
/// taken for absent.
fn uris<'a>(certificate: &X509Certificate<'a>) -> Option<Vec<&'a str>> {
    let names = certificate.subject_alternative_name().ok()?;
    let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    if names.iter().any(|name| matches!(name, GeneralName::Invalid(..))) {
        return None;
    }
    let uri = |name: &GeneralName<'a>| if let GeneralName::URI(uri) = name { Some(*uri) } else { None };
    Some(names.iter().filter_map(uri).collect())
}
