//! The task that owns one VM.
//!
//! * [`actor`]: handles commands, events of the VMM, messages of the guest, and deadlines.
//! * `phase`: its states, with a diagram.
//! * `start`: starts the VMM of a plan.
//! * `policy`: changes the network policy and limits while the VM runs.
//! * `guest`: handles the guest's messages.
//! * `saver`: writes the record.
//! * `hibernate`: hibernation and wake.
//! * `stop`: stop, kill and their deadlines.
//! * `end`: handles the end of the VMM, and removal.
//! * [`adopt`]: adoption of VMs that outlived a daemon.
//! * `leftovers`: finds and ends VMMs that an earlier daemon left.
//! * `unreadable`: VMs whose record can't be read.

pub mod actor;
pub mod adopt;
pub(crate) mod end;
mod guest;
mod hibernate;
mod leftovers;
mod phase;
mod policy;
mod saver;
mod start;
mod stop;
mod unreadable;

pub use actor::create;
pub use stop::DEFAULT_GRACE;
