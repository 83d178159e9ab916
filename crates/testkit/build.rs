//! Strips symbols from the witness, because it is copied into small VMs.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bin=jiffy-witness=-s");
}
