//! The witness is copied into small VMs: it goes without symbols.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bin=jiffy-witness=-s");
}
