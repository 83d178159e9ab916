//! jiffyd: images, the registry of VMs, and the API.

fn main() {}
