//! Cargo.lock, held without any further tool: what must never enter the tree, and where crates come from.

use crate::source::read;

/// One TLS (rustls), one provider (ring): a second one doubles what has to be trusted.
const BANNED: &[&str] = &["openssl", "openssl-sys", "native-tls", "aws-lc-rs", "aws-lc-sys", "rsa"];

fn packages(lock: &str) -> Vec<(String, Option<String>)> {
    let field = |block: &str, name: &str| {
        let value = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
        value.map(|value| value.trim_matches('"').to_owned())
    };
    let blocks = lock.split("[[package]]").skip(1);
    blocks.map(|block| (field(block, "name").expect("a name"), field(block, "source"))).collect()
}

#[test]
fn no_second_tls_is_locked() {
    let found: Vec<_> = packages(&read("Cargo.lock"))
        .into_iter()
        .filter(|(name, _)| BANNED.contains(&name.as_str()))
        .collect();
    assert_eq!(found, []);
}

#[test]
fn every_crate_comes_from_the_registry() {
    let all = packages(&read("Cargo.lock"));
    assert!(all.len() > 100, "Cargo.lock was not understood: {} packages", all.len());
    let ours = |(name, source): &&(String, Option<String>)| match source.as_deref() {
        None => name != "bcd",
        Some(source) => source != "registry+https://github.com/rust-lang/crates.io-index",
    };
    assert_eq!(all.iter().filter(ours).collect::<Vec<_>>(), Vec::<&(String, Option<String>)>::new());
}
