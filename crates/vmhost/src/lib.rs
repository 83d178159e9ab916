//! VMs on their host: each is owned by one task, and its VMM is a process of its own.
//!
//! * [`jails`]: starts VMMs, in jails if wanted.
//! * [`launch`]: plans of starts, and turning a plan into a running VMM.
//! * [`spares`]: VMMs that are started before they have a VM.
//! * [`task`]: the task that owns a VM; adoption of VMs that outlived a daemon.
//! * [`handle`]: how other code observes a VM and sends commands to its task.
//! * [`activity`]: counts the uses of a VM.
//! * [`registry`]: all VMs of the node.
//! * [`host`]: resources shared by all tasks.
//! * [`scheduler`]: which processes are urgent for the host's scheduling policy.
//! * [`sched_trace`]: recordings of what ran on each CPU.
//! * [`process`], [`control`]: a VMM's process and events, and its control socket.
//! * [`capture`]: freezes a guest and captures its VM.
//! * [`supervisor`]: reports of a guest's init.
//! * [`agent`], [`frames`], [`proxy`]: requests to a guest's agent, also for clients.
//! * [`log`], [`clients`], [`attach`], [`follow`]: the first command's output and its readers.
//! * [`timeline`]: measurements of a VM's start and run.
//! * [`pager`]: the process that serves memory and disks.
//! * [`network`]: VMs on the host's network.
//! * [`channels`]: connections for VMMs, which may not connect by name.
//! * [`memory_check`]: whether saved memory can be used.
//! * `dial`: connections to VMMs and the pager.
//! * [`folders`], [`single_flight`], [`text`]: VMs' folders, shared operations, safe text.

pub mod activity;
pub mod agent;
pub mod attach;
pub mod capture;
pub mod channels;
pub mod clients;
pub mod control;
mod dial;
pub mod events;
pub mod folders;
pub mod follow;
pub mod frames;
pub mod handle;
pub mod host;
pub mod jails;
pub mod launch;
pub mod log;
pub mod memory_check;
pub mod network;
pub mod pager;
pub mod process;
pub mod proxy;
pub mod registry;
pub mod sched_trace;
pub mod scheduler;
pub mod single_flight;
pub mod spares;
pub mod supervisor;
pub mod task;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod timeline;
