//! Builds the PVH test kernel that the tests boot, and has the linker put the
//! functions of a start beside one another (see `scripts/startup-order`).

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

    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    println!("cargo::rerun-if-changed=startup.ld");
    println!("cargo::rustc-link-arg-bins=-Wl,-T,{here}/startup.ld");
}
