//! Tests with a real registry, and real tools as other clients.

mod artifacts;
mod images;
mod signatures;
mod skopeo;
mod tls_and_passwords;

use jiffy_registry::testing::{LocalRegistry, RegistryOptions};
use jiffy_registry::{Client, ClientOptions, Reference};

fn registry() -> LocalRegistry {
    LocalRegistry::start(&RegistryOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn client() -> Client {
    Client::new(ClientOptions::default()).unwrap()
}

fn reference(registry: &LocalRegistry, rest: &str) -> Reference {
    Reference::parse(&format!("{}/{rest}", registry.host()), None).unwrap()
}

/// Bytes without repetition, the same in every run.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(next)
        .take(count / 8 + 1)
        .flatten()
        .collect();
    bytes.truncate(count);
    bytes
}
