//! Safe wrappers of Linux calls, and facts about the host: folders, clocks, errors.
//!
//! * [`activity`]: what the threads of this process do, recorded on demand.
//! * [`arenas`]: limits the heaps of glibc's allocator to one.
//! * [`backlog`]: how many connections wait until a server accepts them.
//! * [`causes`]: errors and their causes.
//! * [`clock`]: the monotonic clock of all timelines.
//! * [`contents`]: reads a small file from any file position.
//! * [`descriptors`]: the limit of open files (RLIMIT_NOFILE).
//! * [`dial`]: connections to Unix sockets, also for a program that may not connect by name.
//! * [`durable`]: atomic replacement of files.
//! * [`environment`]: empty variables count as unset.
//! * [`epoll`]: waiting for events with a timeout in nanoseconds.
//! * [`fds`]: descriptors sent over a Unix socket.
//! * [`folders`]: Jiffy's folders.
//! * [`mod@fork`]: fork(2) of a process with one thread.
//! * [`handed`]: open files that this process inherited, by their paths.
//! * [`locked`]: files locked with flock(2).
//! * [`log_limit`]: limits the log messages that a guest or its monitor can cause.
//! * [`mapped`]: read-only mappings of files that another process writes.
//! * [`memfd`]: memfds with small or huge pages.
//! * [`mutex`]: mutexes and other locks that ignore poisoning.
//! * [`netlink`]: netlink requests to the kernel.
//! * [`ownership`]: whether only this user may write to a folder.
//! * [`page_cache`]: which pages of a file are in the page cache.
//! * [`pagemap`]: which pages of a mapping were written.
//! * [`peer`]: the process at the other end of a Unix socket.
//! * [`kick`]: a signal that makes one thread leave a blocking call.
//! * [`priority`]: work at a lower priority.
//! * [`private_socket`]: a Unix socket that only its owner may connect to.
//! * [`programs`]: finds programs on PATH.
//! * [`regular`]: opens regular files only.
//! * [`rtc`]: interrupts of the hardware clock.
//! * [`sealed`]: bytes handed to another process in a sealed memfd.
//! * [`seccomp`]: system call filters.
//! * [`spare`]: processes that are started before their task is known.
//! * [`spawn`]: starts a program in its own session.
//! * [`stamp`]: whether a file is still what it was.
//! * [`tap`]: creates TAP devices.
//! * [`tap_queue`]: a queue of a TAP device, for the process that serves it.
//! * [`termination`]: SIGTERM and SIGINT as a descriptor.
//! * `testing`: programs that tests execute.
//! * [`userfaultfd`]: page faults of one process, served by another.

pub mod activity;
pub mod arenas;
pub mod backlog;
pub mod causes;
pub mod clock;
pub mod contents;
pub mod descriptors;
pub mod dial;
pub mod durable;
pub mod environment;
pub mod epoll;
pub mod fds;
pub mod folders;
pub mod fork;
pub mod handed;
pub mod kick;
pub mod locked;
pub mod log_limit;
pub mod mapped;
pub mod memfd;
pub mod mutex;
pub mod netlink;
pub mod ownership;
pub mod page_cache;
pub mod pagemap;
pub mod peer;
pub mod priority;
pub mod private_socket;
pub mod programs;
pub mod regular;
pub mod rtc;
pub mod sealed;
pub mod seccomp;
pub mod spare;
pub mod spawn;
pub mod stamp;
pub mod tap;
pub mod tap_queue;
pub mod termination;
#[cfg(feature = "testing")]
pub mod testing;
pub mod userfaultfd;
