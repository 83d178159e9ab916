//! The files that a node keeps on disk, and the ledgers of memory and disk room.
//!
//! * [`model`]: what VMs, images and snapshots are: types without I/O.
//! * [`records`]: how those are saved, each file in versioned types of its own.
//! * [`images`]: root file systems, their chunks and the caches of lazy disks.
//! * [`snapshots`]: captured VMs.
//! * [`volumes`], [`roots`], [`kernels`]: the other things VMs are made of.
//! * [`transfer`]: images and snapshots to and from registries.
//! * [`checks`]: limits of a VM's parts, for requests and for snapshots from other nodes.
//! * [`room`]: the ledgers of memory and of disk room.
//! * [`paths`]: where all of it is.
//! * [`token`]: what clients must send to be served.
//! * [`digests`]: of files that decide whether a snapshot fits.
//! * [`durable`], [`names`], [`clock`], [`error`]: small things many need.

pub mod checks;
pub mod clock;
pub mod digests;
pub mod durable;
pub mod error;
pub mod images;
pub mod kernels;
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
