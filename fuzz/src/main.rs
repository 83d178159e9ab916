//! All targets under libFuzzer; `FUZZ_TARGET` names the one that is called. Its seeds
//! are written into the folder that `FUZZ_SEEDS` names.

#![no_main]

use jiffy_fuzz::Target;
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    jiffy_fuzz::find(&name).unwrap_or_else(|| panic!("FUZZ_TARGET names no target: {name:?}"))
});

fuzz_target!(
    init: {
        let folder = std::env::var_os("FUZZ_SEEDS").map(PathBuf::from);
        for (number, seed) in (TARGET.seeds)().iter().enumerate() {
            if let Some(folder) = &folder {
                let path = folder.join(format!("seed-{number:03}"));
                std::fs::write(path, seed).expect("a seed can be written");
            }
        }
    },
    |data: &[u8]| (TARGET.run)(data)
);
