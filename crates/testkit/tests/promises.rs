//! Promises of SPECIFICATION.md that need no machine.

use std::path::{Path, PathBuf};
use std::process::Command;

fn dist(path: &str) -> PathBuf {
    jiffy_testkit::dist().join(path)
}

fn size(path: &str) -> u64 {
    let path = dist(path);
    std::fs::metadata(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run `make build`", path.display()))
        .len()
}

#[test]
fn jiffy_init_and_the_base_kernel_stay_within_their_sizes() {
    assert!(size("lib/jiffy/jiffy-init") <= 1536 * 1024);
    assert!(size("share/jiffy/kernels/base/vmlinux") <= 6 * 1024 * 1024);
}

/// An installed `jiffy kernel build` has every file of the checkout.
#[test]
fn the_kernel_sources_are_installed_unchanged() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel");
    let mut compared = 0;
    for folder in ["", "patches"] {
        for entry in std::fs::read_dir(here.join(folder)).expect("the checkout") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy();
            // Measurements are for developers only.
            if path.is_dir() || name.starts_with("measure") {
                continue;
            }
            let installed = dist("share/jiffy/kernel").join(folder).join(&*name);
            let there = std::fs::read(&installed)
                .unwrap_or_else(|error| panic!("{}: {error}", installed.display()));
            let same = std::fs::read(&path).expect("it can be read") == there;
            assert!(
                same,
                "{} differs from the build: run `make build`",
                installed.display()
            );
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

#[test]
fn the_exit_status_of_doctor_is_0_3_or_4() {
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
