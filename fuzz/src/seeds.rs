//! Inputs to begin with, written by the target itself so that they follow its
//! format.

use std::path::PathBuf;

/// Writes `seeds` into the folder that `FUZZ_SEEDS` names, if it does.
pub fn write(seeds: impl IntoIterator<Item = Vec<u8>>) {
    let Some(folder) = std::env::var_os("FUZZ_SEEDS").map(PathBuf::from) else {
        return;
    };
    for (number, seed) in seeds.into_iter().enumerate() {
        let path = folder.join(format!("seed-{number:03}"));
        std::fs::write(&path, seed).expect("a seed can be written");
    }
}
