//! What VMs, images and snapshots are: types without I/O. How each is saved is in
//! [`crate::records`].
//!
//! * [`vm`]: a VM's record and what it is made of.
//! * [`image`]: the record of an image, and disks that are filled on demand.
//! * [`network`]: the node's networks.
//! * [`snapshot`]: what a captured VM is and what it needs.
//! * [`artifact`]: what of these is in a registry.

pub mod artifact;
pub mod image;
pub mod network;
pub mod snapshot;
pub mod vm;
