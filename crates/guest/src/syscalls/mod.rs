//! The system calls that rustix has no safe wrapper for. All of the crate's
//! `unsafe` but its entry point is in this folder.
//!
//! * [`raw`]: the instruction, and thin wrappers.
//! * [`spawn`]: starts a program without copying init's address space.
//! * [`ports`]: I/O ports.
//! * [`vsock`]: addresses of AF_VSOCK.
#![allow(unsafe_code)] // Raw system calls; each block says why it is sound.

pub mod ports;
mod raw;
pub mod spawn;
pub mod vsock;

pub use raw::*;
