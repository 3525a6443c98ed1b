//! Chance, split from one seed: each part draws from its own stream, so that one more draw in one part moves
//! nothing in another.

use rand::SeedableRng;
use rand::rngs::StdRng;
use sha2::{Digest as _, Sha256};

/// The stream of `part` number `index` under `seed`.
pub fn stream(seed: u64, part: &str, index: u64) -> StdRng {
    let mut hash = Sha256::new();
    hash.update(seed.to_be_bytes());
    hash.update(index.to_be_bytes());
    hash.update(part.as_bytes());
    StdRng::from_seed(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use rand::RngCore;

    use super::*;

    #[test]
    fn a_stream_is_its_own_and_comes_again() {
        let first = |seed, part, index| stream(seed, part, index).next_u64();
        assert_eq!(first(1, "agent", 0), first(1, "agent", 0));
        let all = [first(1, "agent", 0), first(1, "agent", 1), first(2, "agent", 0), first(1, "chaos", 0)];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
