//! Guest kernels: requirements, lists, builds.
//!
//! - [`command_line`]: the command line every Linux guest gets.
//! - [`image`]: reads a kernel file: ELF with a PVH note, or bzImage, and the
//!   configuration embedded in either.
//! - [`config`]: a kernel configuration as text.
//! - [`check`]: what a kernel lacks for Jiffy, or for Docker inside a guest.
//! - [`list`]: the kernels built or installed on this machine.
//! - [`build`]: builds one with the `kernel/build` script.

pub mod build;
pub mod check;
pub mod command_line;
pub mod config;
pub mod image;
pub mod list;

mod requirements;
