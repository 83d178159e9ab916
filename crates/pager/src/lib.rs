//! Serves page faults of many VMs, and the chunks of their disks, out of images.
//! `docs/pager.md` tells how to talk to it.
//!
//! * [`image`]: what the pager wants of an image.
//! * [`handshake`]: what a VMM says about its memory, checked.
//! * [`vm`]: one VM's memory: what is filled, what was given up.
//! * [`pool`]: the workers, for all VMs: faults first, prefetch after.
//! * [`working_set`]: what many restores need, in memory once for all.
//! * [`io_pool`]: threads for what may have to wait for others: lanes, by whom.
//! * [`scratch`]: the buffers of one thread.
//! * [`origins`]: who has what is missing of an image.
//! * [`disk`]: a disk whose cache is filled as its VMMs ask for it.
//! * [`server`]: the control socket and the VMs' sockets.
//! * [`replay`]: a recorded restore, without a VM, against strategies.

mod bitmap;
pub mod disk;
pub mod handshake;
pub mod image;
pub mod io_pool;
pub mod origins;
pub mod pool;
pub mod replay;
pub mod scratch;
pub mod server;
pub mod vm;
mod window;
pub mod working_set;
