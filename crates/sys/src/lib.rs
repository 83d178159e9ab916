//! Safe wrappers around the few Linux calls Jiffy needs, and what its programs know of the
//! host: folders, clocks, errors.
//!
//! * [`ahead`]: processes that are started before their task is known.
//! * [`causes`]: an error with what caused it.
//! * [`clock`]: the monotonic clock every timeline uses.
//! * [`contents`]: reads a small file.
//! * [`descriptors`]: the limit of open files.
//! * [`durable`]: atomic replacement of files.
//! * [`fds`]: descriptors sent over a Unix socket.
//! * [`folders`]: where Jiffy keeps its files.
//! * [`mod@fork`]: fork(2) of a process with one thread.
//! * [`handed`]: files that this process was handed open.
//! * [`locked`]: files locked with flock(2).
//! * [`mapped`]: read-only mappings of files that another process writes.
//! * [`memfd`]: memfds, in small or huge pages.
//! * [`mutex`]: mutexes without poison.
//! * [`netlink`]: requests to the kernel's network.
//! * [`ownership`]: who may write to a folder.
//! * [`pagemap`]: which pages of a mapping were written.
//! * [`kick`]: a signal that makes one thread leave a blocking call.
//! * [`private_socket`]: a Unix socket that only its owner may connect to.
//! * [`regular`]: opens regular files only.
//! * [`spawn`]: a program in a session of its own.
//! * [`tap`]: network links whose other end is a descriptor.
//! * [`tap_queue`]: such a descriptor, as whoever serves it sees it.
//! * [`termination`]: SIGTERM and SIGINT as a descriptor.
//! * [`userfaultfd`]: page faults of one process, served by another.

pub mod ahead;
pub mod causes;
pub mod clock;
pub mod contents;
pub mod descriptors;
pub mod durable;
pub mod fds;
pub mod folders;
pub mod fork;
pub mod handed;
pub mod kick;
pub mod locked;
pub mod mapped;
pub mod memfd;
pub mod mutex;
pub mod netlink;
pub mod ownership;
pub mod pagemap;
pub mod private_socket;
pub mod regular;
pub mod spawn;
pub mod tap;
pub mod tap_queue;
pub mod termination;
pub mod userfaultfd;
