//! Generates the wire's Rust types from `proto/` with a protobuf compiler written in Rust (users need no protoc),
//! with the shape of each (src/wire/shape.rs), and notes the build's time: the floor below which a node without any server time judges no certificate.

use std::time::{SystemTime, UNIX_EPOCH};

/// `TYPE_MESSAGE` and `LABEL_REPEATED` of descriptor.proto.
const MESSAGE: i32 = 11;
const REPEATED: i32 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-env-changed=SOURCE_DATE_EPOCH");
    println!("cargo:rustc-env=BCD_BUILD_TIME_S={}", build_time_s()?);
    let files = ["proto/bcd/v1/services.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    let out = std::env::var("OUT_DIR")?;
    let messages = descriptors.file.iter().flat_map(|file| &file.message_type);
    let shapes: String = messages
        .map(|message| {
            let elements = message.field.iter().filter_map(|field| {
                let nested =
                    field.type_name().strip_prefix(".bcd.v1.").filter(|_| field.r#type() as i32 == MESSAGE);
                let shape = match nested {
                    // Entries of a map are nested messages of scalars.
                    Some(name) if name.contains('.') => "Some(&ENTRY)".to_owned(),
                    Some(name) => format!("Some(&{})", name.to_uppercase()),
                    None if field.label() as i32 == REPEATED => "None".to_owned(),
                    None => return None,
                };
                Some(format!("({}, {shape}), ", field.number()))
            });
            let (name, elements) = (message.name(), elements.collect::<String>());
            let upper = name.to_uppercase();
            format!(
                "static {upper}: Shape = Shape(&[{elements}]);\n\
                 impl Shaped for pb::{name} {{ fn shape() -> &'static Shape {{ &{upper} }} }}\n"
            )
        })
        .collect();
    std::fs::write(format!("{out}/shapes.rs"), shapes)?;
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
