//! Frames ⇄ model, version negotiation, envelopes, and the link that carries them.
//!
//! Only [`grpc`] and the gateway name a transport; everything else sees a [`link::Link`].

pub mod bundle;
pub mod codec;
#[cfg(all(test, feature = "fakehw"))]
mod contract;
pub mod der;
pub mod dsse;
pub mod enroll;
pub mod frames;
pub mod grpc;
pub mod link;
#[cfg(feature = "fakehw")]
pub mod memory;
pub mod report;
pub mod revocation;
pub mod shape;
pub mod status;
pub mod tls;
pub mod version;
pub mod x509;

/// The generated types of `proto/bcd/v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod pb {
    tonic::include_proto!("bcd.v1");
}
