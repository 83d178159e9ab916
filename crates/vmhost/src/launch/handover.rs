//! Descriptors passed to a VMM: its events, the files it restores from and, in a jail, every file
//! and socket that its configuration names.

use super::folders::SharedFolder;
use super::plan::Handle;
use crate::channels::{self, Channel, Target};
use crate::jails::Launcher;
use crate::network::Peer;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::image::LazyDisk;
use jiffy_content::paths::Paths;
use jiffy_sys::dial::{channel_of, socket_of_port};
use jiffy_sys::private_socket::bind_private;
use jiffy_sys::regular;
use jiffy_sys::spawn::FIRST_DESCRIPTOR;
use jiffy_wire::agent::SUPERVISOR_PORT;
use jiffy_wire::vmm::{Guard, Handed, NetBackend, SavedMemory, Serial, Source, VmmConfig};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Backlog of the control socket.
const CONTROL_BACKLOG: i32 = 128;
/// Backlog of the vsock socket: programs may connect while the guest boots.
const VSOCK_BACKLOG: i32 = 1024;

/// The descriptors that a VMM inherits; its events come first.
pub(super) struct Descriptors<'a> {
    pub launcher: &'a Launcher,
    /// Is there a process to inherit them?
    used: bool,
    passed: Vec<Passed<'a>>,
    /// Bytes of the largest file that it may write to as a disk.
    largest_disk: u64,
    /// The node's ends of the VMM's channels.
    pub channels: Vec<Channel>,
    /// The node's end of the connection that the guest's init uses first.
    pub supervisor: Option<OwnedFd>,
}

enum Passed<'a> {
    Borrowed(BorrowedFd<'a>),
    Owned(OwnedFd),
}

impl Passed<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Passed::Borrowed(file) => *file,
            Passed::Owned(file) => file.as_fd(),
        }
    }
}

impl<'a> Descriptors<'a> {
    pub fn new(launcher: &'a Launcher, events: OwnedFd) -> Descriptors<'a> {
        Descriptors {
            launcher,
            used: true,
            passed: vec![Passed::Owned(events)],
            largest_disk: 0,
            channels: Vec::new(),
            supervisor: None,
        }
    }

    /// No descriptors, for a VMM that has them already.
    pub fn none(launcher: &'a Launcher) -> Descriptors<'a> {
        Descriptors {
            launcher,
            used: false,
            passed: Vec::new(),
            largest_disk: 0,
            channels: Vec::new(),
            supervisor: None,
        }
    }

    /// All descriptors, in order.
    pub fn passed(&self) -> Vec<BorrowedFd<'_>> {
        self.passed.iter().map(Passed::as_fd).collect()
    }

    fn push(&mut self, passed: Passed<'a>) -> i32 {
        let number = FIRST_DESCRIPTOR + self.passed.len() as i32;
        self.passed.push(passed);
        number
    }

    fn passes_descriptors(&self) -> bool {
        self.used && self.launcher.passes_descriptors()
    }

    /// Bytes of the largest file that was passed as a disk to write to; `None` if the VMM opens its
    /// files itself.
    pub fn largest_disk(&self) -> Option<u64> {
        self.passes_descriptors().then_some(self.largest_disk)
    }

    /// How the VMM refers to this file: by path or by descriptor.
    ///
    /// # Errors
    ///
    /// If the file exists, but can't be opened.
    pub fn source(&mut self, handle: &'a Handle) -> Result<Source> {
        match handle {
            Handle::Open(file) => Ok(Source::Fd(self.push(Passed::Borrowed(file.as_fd())))),
            Handle::Path(path) if self.passes_descriptors() => {
                let file = open(path, false, OFlags::empty())?;
                Ok(file.map_or_else(
                    || Source::Path(path.clone()),
                    |file| Source::Fd(self.push(Passed::Owned(file))),
                ))
            }
            Handle::Path(path) => Ok(Source::Path(path.clone())),
        }
    }

    /// The other end of a network interface, and what guards it. A standby has them already.
    pub fn network(&mut self, peer: &'a Peer) -> (NetBackend, Option<Guard>) {
        if !self.used {
            return (NetBackend::None, None);
        }
        let mut push = |file: &'a OwnedFd| self.push(Passed::Borrowed(file.as_fd()));
        match peer {
            Peer::Tap(queues) => (NetBackend::Tap(queues.iter().map(push).collect()), None),
            Peer::Passt(socket, guard) => (
                NetBackend::Passt(Source::Fd(push(socket))),
                Some(guard.clone()),
            ),
        }
    }

    /// The VMM's socket to the server of a shared folder.
    pub fn folder(&mut self, folder: &'a SharedFolder) -> Option<i32> {
        self.used
            .then(|| self.push(Passed::Borrowed(folder.vmms.as_fd())))
    }

    /// How the VMM refers to these files, in order.
    ///
    /// # Errors
    ///
    /// If one exists, but can't be opened.
    pub fn sources(&mut self, handles: &'a [Handle]) -> Result<Vec<Source>> {
        handles.iter().map(|handle| self.source(handle)).collect()
    }

    /// The descriptor of the configuration's file, if the VMM can't open it.
    ///
    /// # Errors
    ///
    /// If the file can't be opened.
    pub fn config(&mut self, config: &Path) -> Result<Option<i32>> {
        if !self.passes_descriptors() {
            return Ok(None);
        }
        let file = File::open(config)
            .map_err(|error| Error::io("open the VM's configuration", config, &error))?;
        Ok(Some(self.push(Passed::Owned(file.into()))))
    }

    /// Passes all other files and sockets that the VMM can't open itself. A file that does not
    /// exist is not passed; the VMM reports it.
    ///
    /// # Errors
    ///
    /// If a file exists, but can't be opened, or a log, a record or a socket can't be made.
    pub fn pass(
        &mut self,
        config: &VmmConfig,
        paths: &Paths,
        lazy: Option<&LazyDisk>,
    ) -> Result<Vec<Handed>> {
        if !self.passes_descriptors() {
            return Ok(Vec::new());
        }
        let mut handed = Vec::new();
        let mut largest_disk = 0;
        let mut add = |name: &Path, file: OwnedFd| {
            handed.push(Handed {
                name: name.to_owned(),
                fd: self.push(Passed::Owned(file)),
            });
        };
        if config.restore.is_none() {
            let files = [Some(&config.boot.kernel), config.boot.initrd.as_ref()];
            for name in files.into_iter().flatten() {
                if let Some(file) = open(name, false, OFlags::empty())? {
                    add(name, file);
                }
            }
        }
        for disk in &config.disks {
            let flags = match disk.direct {
                true => OFlags::DIRECT,
                false => OFlags::empty(),
            };
            if let Some(file) = open(&disk.path, !disk.read_only, flags)? {
                if !disk.read_only {
                    let size = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_size as u64);
                    largest_disk = largest_disk.max(size);
                }
                add(&disk.path, file);
            }
            if let Some(residency) = &disk.residency
                && let Some(file) = open(&residency.present, false, OFlags::empty())?
            {
                add(&residency.present, file);
            }
        }
        if let Some(Serial::File(name)) = &config.serial {
            let mut options = OpenOptions::new();
            let options = options.read(true).append(true).create(true);
            let file = regular::make_with(options, name)
                .map_err(|error| Error::io("make the console's log", name, &error))?;
            add(name, file.into());
        }
        let restore = config.restore.as_ref();
        let gate_record = restore.and_then(|restore| restore.gate_record.as_ref());
        for name in [config.exit_record.as_ref(), gate_record]
            .into_iter()
            .flatten()
        {
            let mut options = OpenOptions::new();
            let options = options.write(true).create(true).truncate(true);
            let file = regular::make_with(options, name)
                .map_err(|error| Error::io("make a VM's record", name, &error))?;
            add(name, file.into());
        }
        let vsock = config
            .vsock
            .as_ref()
            .map(|vsock| (&vsock.path, VSOCK_BACKLOG));
        let control = config.control.as_ref().map(|path| (path, CONTROL_BACKLOG));
        for (name, backlog) in vsock.into_iter().chain(control) {
            let socket = paths.vm_run(&config.id).join(name);
            let listener = bind_private(&socket, backlog)
                .map_err(|error| Error::io("make a VMM's socket", &socket, &error))?;
            add(name, listener.into());
        }
        self.largest_disk = largest_disk;
        self.pass_connections(config, lazy, &mut handed)
            .map_err(|error| Error::internal(format!("A socket can't be made: {error}.")))?;
        Ok(handed)
    }

    /// Passes channels for the connections that the VMM may need, and the first one of its guest.
    fn pass_connections(
        &mut self,
        config: &VmmConfig,
        lazy: Option<&LazyDisk>,
        handed: &mut Vec<Handed>,
    ) -> io::Result<()> {
        let mut targets = Vec::new();
        if let Some(vsock) = &config.vsock {
            targets.push((&vsock.path, Target::Programs));
            let (ours, theirs) = channels::pair()?;
            self.supervisor = Some(ours);
            handed.push(Handed {
                name: socket_of_port(&vsock.path, SUPERVISOR_PORT),
                fd: self.push(Passed::Owned(theirs)),
            });
        }
        if let Some(restore) = &config.restore
            && let SavedMemory::Paged { socket, .. } = &restore.memory
        {
            targets.push((socket, Target::Memory));
        }
        let mut disks = config.disks.iter();
        let residency = disks.find_map(|disk| disk.residency.as_ref());
        if let (Some(residency), Some(lazy)) = (residency, lazy) {
            targets.push((&residency.pager_socket, Target::Disk(lazy.clone())));
        }
        for (socket, target) in targets {
            let (channel, theirs) = Channel::new(target)?;
            self.channels.push(channel);
            handed.push(Handed {
                name: channel_of(socket),
                fd: self.push(Passed::Owned(theirs)),
            });
        }
        Ok(())
    }
}

/// Opens a file of a VM of any type. The VMM checks the type; O_NONBLOCK keeps the open of a FIFO
/// from blocking.
fn open(name: &Path, write: bool, flags: OFlags) -> Result<Option<OwnedFd>> {
    let flags = (flags | OFlags::NONBLOCK).bits() as i32;
    let mut options = OpenOptions::new();
    match options
        .read(true)
        .write(write)
        .custom_flags(flags)
        .open(name)
    {
        Ok(file) => Ok(Some(file.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("open a VM's file", name, &error)),
    }
}
