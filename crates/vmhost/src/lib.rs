//! VMs on their host: each owned by one task, its VMM a process of its own.
//!
//! * [`jails`]: VMMs and the jails they run in.
//! * [`launch`]: what a start needs, and from that to a running VMM.
//! * [`spares`]: VMMs that were started ahead.
//! * [`task`]: the task that owns a VM; VMs that outlived a daemon.
//! * [`handle`]: how others see a VM and talk to its task.
//! * [`registry`]: which VMs there are.
//! * [`host`]: what all tasks share.
//! * [`process`], [`control`]: a VMM's process and events, and its control socket.
//! * [`capture`]: a guest held still, and its memory and state taken.
//! * [`supervisor`]: what a guest's init tells unasked.
//! * [`agent`], [`frames`], [`proxy`]: asking a guest's agent, and passing it on to clients.
//! * [`log`], [`clients`], [`attach`], [`follow`]: the first command's output and its readers.
//! * [`timeline`]: what was measured.
//! * [`pager`]: the process that serves memory and disks.
//! * [`network`]: what VMs have of the host's network.
//! * [`folders`], [`text`]: small things many need.

pub mod agent;
pub mod attach;
pub mod capture;
pub mod clients;
pub mod control;
pub mod folders;
pub mod follow;
pub mod frames;
pub mod handle;
pub mod host;
pub mod jails;
pub mod launch;
pub mod log;
pub mod network;
pub mod pager;
pub mod process;
pub mod proxy;
pub mod registry;
pub mod spares;
pub mod supervisor;
pub mod task;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod timeline;
