//! Promises of SPECIFICATION.md that need no machine.

use std::path::{Path, PathBuf};
use std::process::Command;

fn dist(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../dist")
        .join(path)
}

fn size(path: &str) -> u64 {
    let path = dist(path);
    std::fs::metadata(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run `make build`", path.display()))
        .len()
}

#[test]
fn what_every_guest_carries_is_small() {
    assert!(size("lib/jiffy/jiffy-init") <= 1536 * 1024);
    assert!(size("share/jiffy/kernels/base/vmlinux") <= 6 * 1024 * 1024);
}

#[test]
fn the_doctors_status_tells_scripts() {
    for _ in 0..3 {
        let output = Command::new(dist("bin/jiffy"))
            .args(["doctor", "--format", "json"])
            .output()
            .expect("jiffy runs");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(report.is_object(), "{report}");
        let status = output.status.code();
        assert!(matches!(status, Some(0 | 3 | 4)), "{status:?}");
    }
}
