//! Debian's skopeo.

use jiffy_registry::testing::missing;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Runs `skopeo` with these arguments and gives its output; anything else is a failure.
pub fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> String {
    let output = Command::new("skopeo")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}", missing("skopeo", &error)));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "skopeo: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Copies, without a policy of signatures and without TLS.
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

/// The name of an image in an OCI layout.
pub fn layout(folder: &Path, tag: &str) -> String {
    format!("oci:{}:{tag}", folder.display())
}
