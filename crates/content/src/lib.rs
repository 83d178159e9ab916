//! The files that a node keeps on disk, and the ledgers of memory and disk room.
//!
//! * [`model`]: what VMs, images and snapshots are: types without I/O.
//! * [`records`]: how those are saved, each file in versioned types of its own.
//! * [`images`]: root file systems, their chunks and the caches of lazy disks.
//! * [`snapshots`]: captured VMs.
//! * [`volumes`], [`roots`], [`kernels`]: volumes, root disks and kernels of VMs.
//! * [`leases`]: what of them is in use.
//! * [`transfer`]: images and snapshots to and from registries.
//! * [`checks`]: limits of a VM's parts, for requests and for snapshots from other nodes.
//! * [`room`]: the ledgers of memory, vCPUs and disk room.
//! * [`paths`]: the paths of a node's files and sockets.
//! * [`token`]: the token that clients must send.
//! * [`digests`]: digests of the files that decide whether a snapshot fits this node.
//! * [`durable`], [`names`], [`clock`], [`error`]: helpers for many modules.

pub mod checks;
pub mod clock;
pub mod digests;
pub mod durable;
pub mod error;
pub mod images;
pub mod kernels;
pub mod leases;
pub mod model;
pub mod names;
pub mod paths;
pub mod records;
pub mod room;
pub mod roots;
pub mod snapshots;
#[cfg(feature = "testing")]
pub mod testing;
pub mod token;
pub mod transfer;
pub mod volumes;
