//! Decides how `jiffy-init` is linked.
//!
//! The `small` profile (the only one with `opt-level = "s"`) builds it
//! freestanding: no std, no C library. A static std program starts at 1.1 MB
//! and executes 43 CPUID instructions, each of which leaves the guest, before
//! its `main`. Every other profile builds the same code on std, which is what
//! the tests run.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(freestanding)");
    let size_matters = std::env::var("OPT_LEVEL").is_ok_and(|level| level == "s");
    println!("cargo::rerun-if-changed=discard.ld");
    if size_matters {
        let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{folder}/discard.ld");
        println!("cargo::rustc-cfg=freestanding");
        for argument in [
            "-nostartfiles",
            "-nostdlib",
            "-static",
            // One page for what was written as code and one for constants
            // each; no page tables, notes or tables nobody reads.
            "-Wl,--build-id=none,--gc-sections,-z,norelro,-z,noseparate-code,--no-eh-frame-hdr",
        ] {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
}
