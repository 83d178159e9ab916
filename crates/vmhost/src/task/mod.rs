//! The task that owns one VM.
//!
//! * [`actor`]: it takes commands and hears the VMM, the guest and time.
//! * `phase`: what it holds, as a diagram.
//! * `policy`: what it may reach, changed while it runs.
//! * `guest`: what it makes of the guest's messages.
//! * `saver`: the record on its way to the disk.
//! * `hibernate`: without a VMM for a while.
//! * `stop`: the orderly end, and the less orderly ones.
//! * `end`: what is left to do when the VMM is gone.
//! * [`adopt`]: VMs that outlived a daemon.
//! * `unreadable`: those whose record can't be read.

pub mod actor;
pub mod adopt;
mod end;
mod guest;
mod hibernate;
mod phase;
mod policy;
mod saver;
mod stop;
mod unreadable;

pub use actor::create;
pub use stop::DEFAULT_GRACE;
