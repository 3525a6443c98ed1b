//! Generates the wire's Rust types from `proto/` with a protobuf compiler written in Rust (users need no protoc),
//! and notes the build's time: the floor below which a node without any server time judges no certificate.

use std::time::{SystemTime, UNIX_EPOCH};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-env-changed=SOURCE_DATE_EPOCH");
    println!("cargo:rustc-env=BCD_BUILD_TIME_S={}", build_time_s()?);
    let files = ["proto/bcd/v1/services.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::wire::codec::FrameCodec")
        .compile_fds(descriptors)?;
    Ok(())
}

/// Seconds since the Unix epoch: SOURCE_DATE_EPOCH where the build must be reproducible, else now.
#[expect(clippy::disallowed_methods, reason = "a build has no clock to be handed")]
fn build_time_s() -> Result<u64, Box<dyn std::error::Error>> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => Ok(text.trim().parse()?),
        Err(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()),
    }
}
