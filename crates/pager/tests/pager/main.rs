//! `jiffy-pager` as a process, with real userfaultfds.

mod disks;
mod floods;
mod full_disk;
mod hostile;
mod jobs;
mod many;
mod packings;
mod recordings;
mod remote;
mod removals;
mod replays;
mod restarts;
mod serving;
mod small_disk;
mod support;
