//! Serves page faults of many VMs out of images. `docs/pager.md` tells how to
//! talk to it.
//!
//! * [`image`]: what the pager wants of an image.
//! * [`handshake`]: what a VMM says about its memory, checked.
//! * [`vm`]: one VM's memory: what is filled, what was given up.
//! * [`pool`]: the workers, for all VMs: faults first, prefetch after.
//! * [`server`]: the control socket and the VMs' sockets.
//! * [`replay`]: a recorded restore, without a VM, against strategies.

mod bitmap;
pub mod handshake;
pub mod image;
pub mod pool;
pub mod replay;
pub mod server;
pub mod vm;
mod window;
