//! Runs Debian's skopeo.

use jiffy_registry::testing::missing;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Runs `skopeo` with these arguments and returns its output. Panics if it fails.
pub fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> String {
    let output = Command::new("skopeo")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}", missing("skopeo", &error)));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "skopeo: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Copies an image, without a signature policy and without TLS.
pub fn copy(from: &str, to: &str) -> String {
    run([
        "--insecure-policy",
        "copy",
        "--all",
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
        from,
        to,
    ])
}

/// Name of an image in an OCI layout, for skopeo.
pub fn layout(folder: &Path, tag: &str) -> String {
    format!("oci:{}:{tag}", folder.display())
}
