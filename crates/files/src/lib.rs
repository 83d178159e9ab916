//! `jiffy-files`: serves one folder of the host to one VM's virtio-fs device, or to the machine.
//!
//! The guest is hostile: it can send any bytes. Whatever it sends, it can only reach what is below
//! the folder, and only make this process hold a limited number of descriptors.
//!
//! * [`options`]: the command line.
//! * [`channel`]: the socket on which requests come.
//! * [`server`]: the threads that serve it.
//! * [`confinement`]: the sandbox.
//! * [`dispatch`]: calls the function that answers a message.
//! * [`protocol`]: requests and answers as bytes.
//! * [`folder`]: the folder, and what all requests use.
//! * [`nodes`]: files that the guest's kernel knows.
//! * [`handles`]: files that the guest has open.
//! * [`budget`]: how many descriptors the guest may use.
//! * [`identity`]: users and groups of guest and host.
//! * [`saved`]: the format of a captured session; `captures` saves and restores it.
//! * `session`, `tree`, `contents`, `listing`, `attributes`, `extended`: the requests.
//!
//! [docs/folders.md](../../../docs/folders.md) describes all of it.

mod attributes;
pub mod budget;
mod captures;
pub mod channel;
pub mod confinement;
mod contents;
pub mod dispatch;
mod extended;
pub mod folder;
pub mod handles;
pub mod identity;
mod listing;
pub mod nodes;
pub mod options;
pub mod protocol;
pub mod saved;
pub mod server;
mod session;
mod tree;
