//! A VMM that is started before its VM's configuration is known.
//!
//! It prepares what every VM needs, and waits for the order that names its VM ([`TakeSpare`]). From
//! then on it is indistinguishable from a VMM that was started for that VM: command line, folder,
//! output and descriptors are the same. It ends when the daemon closes its socket, and leaves
//! nothing behind.

use crate::boot::OpenFile;
use crate::error::StartError;
use crate::prepared::PreparedVm;
use crate::sandbox::{self, Sandbox};
use jiffy_sys::handed;
use jiffy_sys::spare::{self, Argument};
use jiffy_wire::vmm::{SPARE_KERNEL, TakeSpare, VmmConfig};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a spare can't become a VM.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SpareError {
    /// The inherited socket can't be read.
    #[error("the inherited socket can't be read")]
    Socket(#[source] io::Error),
    /// Preparing the VM failed.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The order is not valid.
    #[error("the order that names the VM is not valid")]
    Message(#[from] serde_json::Error),
    /// The order has no output descriptor or no events descriptor.
    #[error("the order that names the VM has no output descriptor or no events descriptor")]
    Descriptors,
    /// The configuration's path does not fit on the command line.
    #[error("the path of the configuration {} is too long for the command line", .0.display())]
    NoRoom(PathBuf),
    /// A host call failed.
    #[error("the host could not {what}")]
    Host {
        /// What failed, to be read after "could not".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The order for a spare.
#[derive(Debug)]
pub struct Order {
    /// Path of the VM's configuration.
    pub config: PathBuf,
    /// Events are written here.
    pub events: File,
    /// What the spare has prepared.
    pub ahead: Ahead,
}

/// What was prepared, and the descriptors that came with the order.
#[derive(Debug)]
pub struct Ahead {
    /// KVM's VM, devices' interrupts, threads.
    pub prepared: PreparedVm,
    sources: Vec<RawFd>,
}

/// Prepares a VM, and waits on the inherited socket; `None` if the socket was closed. `placeholder`
/// is the argument that the configuration's path replaces on the command line.
///
/// # Errors
///
/// If the process's arguments are not found, the VM can't be prepared, procfs can't be closed, the
/// socket can't be read, or the order is not valid ([`SpareError`]).
pub fn wait(
    socket: OwnedFd,
    placeholder: &Path,
    sandbox: Sandbox,
) -> Result<Option<Order>, SpareError> {
    let host = |what| move |source| SpareError::Host { what, source };
    let argument =
        Argument::find(placeholder.as_os_str()).map_err(host("find its command line in memory"))?;
    let kernel = handed::take(Path::new(SPARE_KERNEL));
    let kernel = kernel.and_then(|kernel| OpenFile::of(kernel.into()).ok());
    let mut prepared = PreparedVm::ahead(sandbox, kernel)?;
    spare::touch_program().map_err(host("touch the pages of its program"))?;
    sandbox::close_proc().map_err(host("close procfs"))?;
    // One step at a time: a start that comes meanwhile does not wait for the others.
    while !spare::has_message(socket.as_fd()).map_err(SpareError::Socket)?
        && prepared.prepare_next()
    {}
    match spare::wait(socket.as_fd()).map_err(SpareError::Socket)? {
        Some((message, descriptors)) => {
            take_over(&message, descriptors, &argument, prepared).map(Some)
        }
        None => Ok(None),
    }
}

/// Becomes the VM that the order names.
fn take_over(
    message: &[u8],
    descriptors: Vec<OwnedFd>,
    argument: &Argument,
    prepared: PreparedVm,
) -> Result<Order, SpareError> {
    let host = |what| move |source| SpareError::Host { what, source };
    let mut descriptors = descriptors.into_iter();
    let (Some(output), Some(events)) = (descriptors.next(), descriptors.next()) else {
        return Err(SpareError::Descriptors);
    };
    // From here on errors are written to the VM's log.
    spare::write_to(output.as_fd()).map_err(host("write to the VM's log"))?;
    let TakeSpare { config, config_fd } = serde_json::from_slice(message)?;
    if argument.replace(config.as_os_str()).is_err() {
        return Err(SpareError::NoRoom(config));
    }
    // They stay open until the end, as if inherited.
    let sources: Vec<RawFd> = descriptors.map(IntoRawFd::into_raw_fd).collect();
    match config_fd {
        Some(number) => handed::add_inherited(config.clone(), number_of(&sources, number))
            .map_err(host("take the configuration's descriptor"))?,
        // Without a descriptor it opens files by name, as a VMM does that was started for its VM.
        None => {
            if let Some(folder) = config.parent() {
                std::env::set_current_dir(folder).map_err(host("enter the VM's folder"))?;
            }
        }
    }
    Ok(Order {
        config,
        events: events.into(),
        ahead: Ahead { prepared, sources },
    })
}

impl Ahead {
    /// Writes the numbers that the descriptors have in this process into the configuration; -1 for
    /// one that did not come.
    pub fn name_sources(&self, config: &mut VmmConfig) {
        for number in config.descriptors() {
            *number = number_of(&self.sources, *number);
        }
    }
}

fn number_of(sources: &[RawFd], named: i32) -> RawFd {
    let at = named.checked_sub(TakeSpare::FIRST_SOURCE);
    let at = at.and_then(|at| usize::try_from(at).ok());
    at.and_then(|at| sources.get(at).copied()).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::vmm::{Restore, SavedMemory, Source};

    #[test]
    fn received_descriptors_get_their_numbers_in_the_configuration() {
        let sources = [50, 60, 70];
        let number = |given: i32| {
            let mut restore = Restore::of_captured(&[given, given, given]).unwrap();
            for number in restore.descriptors() {
                *number = number_of(&sources, *number);
            }
            let SavedMemory::Mapped { layers, layout } = restore.memory else {
                panic!("it is mapped");
            };
            assert_eq!(layers, [restore.state.clone()]);
            assert_eq!(layout, Some(restore.state.clone()));
            restore.state
        };
        assert_eq!(number(4), Source::Fd(50));
        assert_eq!(number(6), Source::Fd(70));
        for wrong in [7, 3, 0, -1, i32::MIN, i32::MAX] {
            assert_eq!(number(wrong), Source::Fd(-1));
        }
    }
}
