//! System calls without a safe wrapper in rustix. All `unsafe` code of the crate, except its entry
//! point, is in this folder.
//!
//! * [`raw`]: the `syscall` instruction and thin wrappers.
//! * [`spawn`]: starts a program without copying init's address space.
//! * [`ports`]: I/O ports.
//! * [`vsock`]: addresses of AF_VSOCK.
#![allow(unsafe_code)] // Raw system calls; each block says why it is sound.

pub mod ports;
mod raw;
pub mod spawn;
pub mod vsock;

pub use raw::*;
