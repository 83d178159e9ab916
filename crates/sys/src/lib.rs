//! Safe wrappers around the few Linux calls Jiffy needs, and what its programs know of the
//! host: folders, clocks, errors.
//!
//! * [`ahead`]: a process that waits to be told what it is for.
//! * [`causes`]: an error with what caused it.
//! * [`clock`]: the monotonic clock every timeline uses.
//! * [`contents`]: all of a small file.
//! * [`descriptors`]: how many files a process may have open.
//! * [`durable`]: files replaced whole or not at all.
//! * [`fds`]: descriptors sent over a Unix socket.
//! * [`folders`]: where Jiffy keeps its files.
//! * [`mod@fork`]: a process that goes on as a copy of this one.
//! * [`locked`]: files locked as long as they are open.
//! * [`mapped`]: a file that another process writes, mapped to be read.
//! * [`memfd`]: memory with a descriptor, in small or huge pages.
//! * [`mutex`]: mutexes without poison.
//! * [`netlink`]: requests to the kernel's network.
//! * [`ownership`]: whose a folder is.
//! * [`pagemap`]: which pages of a mapping were written.
//! * [`kick`]: a signal that makes one thread leave a blocking call.
//! * [`private_socket`]: a Unix socket that only its owner may connect to.
//! * [`regular`]: files that must be files.
//! * [`spawn`]: a program in a session of its own.
//! * [`tap`]: network links whose other end is a descriptor.
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
pub mod termination;
pub mod userfaultfd;
