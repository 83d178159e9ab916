//! The device with its queues and thread.

use super::channel::Channel;
use super::config::Config;
use super::error::FsError;
use super::link::{ExchangeError, Link};
use super::state::{FsState, RestoreError};
use super::worker::{STOP_TIMEOUT, Worker};
use super::{PRIORITY_QUEUE, QUEUE_SIZE, REQUEST_QUEUE};
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, VirtioDevice, WorkerRole};
use crate::virtio::queue::ring::Ring;
use crate::virtio::work::Work;
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The device's name in messages.
const NAME: &str = "shared folder";

/// The options of a file system device.
#[derive(Debug)]
pub struct FsArgs {
    /// By which the guest mounts it, 1 to [`TAG_MAX`](super::TAG_MAX) bytes.
    pub tag: String,
    /// A socket of type SOCK_SEQPACKET whose other end answers FUSE requests. Without one, every
    /// request is answered with ENOTCONN.
    pub server: Option<OwnedFd>,
    /// Most bytes of a request or an answer that the server supports.
    pub message_max: usize,
}

/// A folder of the host.
#[derive(Debug)]
pub struct Fs {
    tag: String,
    config: Config,
    /// While no worker runs.
    link: Option<Link>,
    running: Option<Work<(Link, Vec<ActiveQueue>)>>,
    /// How long it waits for answers when it stops.
    stop_timeout: Duration,
    log: Arc<LogLimit>,
}

impl Fs {
    /// A new device.
    ///
    /// # Errors
    ///
    /// If the tag is too long, or the socket can't be used.
    pub fn new(args: FsArgs) -> Result<Fs, FsError> {
        let config = Config::new(&args.tag)?;
        let channel = args.server.map(Channel::new).transpose();
        let link = channel.and_then(|channel| Link::new(channel, args.message_max));
        Ok(Fs {
            tag: args.tag,
            config,
            link: Some(link.map_err(FsError::Socket)?),
            running: None,
            stop_timeout: STOP_TIMEOUT,
            log: Arc::default(),
        })
    }

    /// Restores a device. Its server must know what the one before knew of the guest, or there must be
    /// none: [`Fs::exchange`] tells it, before the device is resumed.
    ///
    /// # Errors
    ///
    /// If the guest has mounted another tag, or [`Fs::new`] fails.
    pub fn restore(args: FsArgs, state: &FsState) -> Result<Fs, RestoreError> {
        state.check(&args.tag)?;
        Ok(Fs::new(args)?)
    }

    /// Replaces [`STOP_TIMEOUT`] from the next activation on, for tests that must not depend on it.
    #[cfg(test)]
    pub(super) fn stop_within(&mut self, time: Duration) {
        self.stop_timeout = time;
    }

    /// Whether its worker was told to stop, if there is one.
    #[cfg(test)]
    pub(super) fn stop_flag(&self) -> Option<Arc<AtomicBool>> {
        self.running.as_ref().map(Work::stop_flag)
    }

    /// Sends a message of the monitor itself to the server, with the id 0, and returns the results.
    /// The server answers one after another.
    ///
    /// # Errors
    ///
    /// If the device is not paused, or the server does not answer so.
    pub fn exchange(&mut self, opcode: u32, arguments: &[&[u8]]) -> Result<Vec<u8>, ExchangeError> {
        let link = self.link.as_mut().ok_or(ExchangeError::Running)?;
        link.exchange(opcode, arguments)
    }

    /// How many messages the server was sent, while the device is paused.
    pub fn sent(&self) -> Option<u64> {
        self.link.as_ref().map(|link| link.sent)
    }

    /// Whether it was given a server, which may have ended.
    pub fn has_server(&self) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| link.channel.is_some())
    }

    /// What a snapshot keeps of the device itself; it must be paused.
    pub fn save(&self) -> FsState {
        FsState {
            tag: self.tag.clone(),
        }
    }
}

impl VirtioDevice for Fs {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; 2]
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues = activation.queues.into_iter();
        let mut ring = |index| {
            let queue = queues.next().flatten();
            let queue = queue.ok_or(ActivateError::MissingQueue(index))?;
            Ok(Ring::new(
                NAME,
                queue,
                activation.interrupt.clone(),
                self.log.clone(),
            ))
        };
        let rings = [ring(PRIORITY_QUEUE)?, ring(REQUEST_QUEUE)?];
        // It is missing only if an earlier worker panicked.
        let lost = || ActivateError::Worker(io::ErrorKind::NotConnected.into());
        let wakeup = self.link.as_ref().ok_or_else(lost)?.wakeup();
        let wakeup = wakeup.map_err(ActivateError::Worker)?;
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            link: self.link.take().ok_or_else(lost)?,
            rings,
            memory: activation.memory,
            stop: stop.clone(),
            stop_timeout: self.stop_timeout,
            log: self.log.clone(),
        };
        let work = Work::start(
            NAME,
            &*activation.workers,
            (WorkerRole::Fs, "fs"),
            (stop, wakeup),
            || worker.run(),
        );
        self.running = Some(work.map_err(ActivateError::Worker)?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.running.take() else {
            return Vec::new();
        };
        running.stop();
        let Some((link, queues)) = running.join() else {
            return Vec::new();
        };
        self.link = Some(link);
        queues
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.deactivate();
    }
}
