//! Serves page faults of many VMs, and the chunks of their disks, from images. `docs/pager.md`
//! describes its protocol.
//!
//! * [`image`]: the pager's interface to an image.
//! * [`handshake`]: parses and checks the memory layout that a VMM sends.
//! * [`vm`]: one VM's memory: which pages are filled, and which were given up.
//! * [`pool`]: the workers for all VMs: faults first, then prefetching.
//! * [`working_set`]: working sets in memory, shared by restores.
//! * [`io_pool`]: threads for work that may wait for registries, in lanes.
//! * [`scratch`]: the buffers of one thread.
//! * [`origins`]: fetches missing chunks of an image, by another program.
//! * [`confinement`]: Landlock and seccomp for the pager.
//! * [`disk`]: a disk whose cache is filled on demand.
//! * [`server`]: the control socket and the VMs' sockets.
//! * [`replay`]: replays a recorded restore with several strategies, without a VM.

mod bitmap;
pub mod confinement;
pub mod disk;
pub mod handshake;
pub mod image;
pub mod io_pool;
pub mod origins;
pub mod pool;
pub mod replay;
pub mod scratch;
mod sentence;
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;
pub mod vm;
mod window;
pub mod working_set;
