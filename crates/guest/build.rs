//! Links `jiffy-init` freestanding, without std and a C library. A static program with std is 1.1
//! MB larger and executes 43 CPUID instructions, each a VM exit, before its `main`.
//!
//! The library in this package is an ordinary one, so its unit tests have std.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=discard.ld");
    if std::env::var_os("CARGO_FEATURE_FREESTANDING").is_none() {
        return;
    }
    // Only that profile is small and aborts on a panic.
    if std::env::var("OPT_LEVEL").as_deref() != Ok("s") {
        println!("cargo::error=jiffy-init can't unwind: build it with --profile small");
        return;
    }
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    for argument in [
        &*format!("-Wl,-T,{folder}/discard.ld"),
        "-nostartfiles",
        "-nostdlib",
        "-static",
        // One segment each for code and constants; no page tables, notes or tables that nothing
        // reads.
        "-Wl,--build-id=none,--gc-sections,-z,norelro,-z,noseparate-code,--no-eh-frame-hdr",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
