//! Builds the PVH test kernel that the tests boot.

use std::path::Path;
use std::process::Command;

fn main() {
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let output = Path::new(&out).join("testkernel");
    println!("cargo::rerun-if-changed=testkernel");
    println!("cargo::rerun-if-env-changed=CC");
    let status = Command::new("testkernel/build").arg(&output).status();
    if !status.as_ref().is_ok_and(|status| status.success()) {
        println!("cargo::error=the test kernel can't be built (is gcc installed?): {status:?}");
    }
}
