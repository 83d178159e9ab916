//! Guest kernels: their requirements, where they are found, and building them.
//!
//! - [`command_line`]: the kernel command line of every Linux guest.
//! - [`image`]: reads a kernel file, ELF with a PVH note or bzImage, and the configuration embedded
//!   in it.
//! - [`config`]: a kernel configuration as text.
//! - [`check`]: which options a kernel lacks for Jiffy, or for Docker inside a guest.
//! - [`list`]: the kernels built or installed on this machine.
//! - [`build`]: builds a kernel with the `kernel/build` script.

pub mod build;
pub mod check;
pub mod command_line;
pub mod config;
pub mod image;
pub mod list;

mod requirements;
