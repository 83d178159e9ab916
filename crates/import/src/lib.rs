//! `jiffy-import`: makes one image of layers, of an archive or of a VM's changes, for the daemon.
//!
//! Bytes of registries, archives and guests are decompressed and parsed in this process, a new one
//! for each image. It inherits open files only: no environment, no credentials, no folder. It is
//! confined before it reads the first byte.
//!
//! * [`confinement`]: what the process may do.
//! * `channel`: messages to the daemon (`wire::import`).
//! * `work`: the imports.

mod channel;
pub mod confinement;
mod work;

use channel::Channel;
use jiffy_sys::handed;
use jiffy_wire::import::{CHANNEL, FailureKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

/// The program: performs the request on the channel and answers it.
pub fn run() -> ExitCode {
    let name = Path::new("channel");
    let channel = handed::add_inherited(name.to_owned(), CHANNEL).map(|()| handed::take(name));
    let Ok(Some(channel)) = channel else {
        eprintln!("jiffy-import: only jiffyd can start this program");
        return ExitCode::FAILURE;
    };
    let confined = confinement::enter();
    if is_closed(&channel) {
        return ExitCode::FAILURE;
    }
    let channel = Channel::new(channel);
    // The process has no standard error, so an answer is the only report.
    let reporter = channel.clone();
    std::panic::set_hook(Box::new(move |panic| {
        let sentence = panic.to_string().replace('\n', " ");
        reporter.fail(FailureKind::Process, sentence);
    }));
    let answered = match confined.and_then(|()| confinement::filter()) {
        Ok(()) => work::perform(&channel),
        Err(error) => {
            let sentence = jiffy_sys::causes::sentence(&error);
            channel.fail(FailureKind::Process, sentence)
        }
    };
    match answered {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Whether the daemon died before this process set its death signal.
fn is_closed(channel: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(channel, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut polled, Some(&now)).is_err() || polled[0].revents().contains(PollFlags::HUP)
}
