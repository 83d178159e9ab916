//! A driver over real rings, and a server at the other end of the socket.

mod limits;
mod malformed;
mod passing;
mod saving;

use super::request::{IN_HEADER, OUT_HEADER};
use super::{Fs, FsArgs, PRIORITY_QUEUE, QUEUE_SIZE, REQUEST_QUEUE};
use crate::GuestMemory;
use crate::virtio::testing::{self, Buffer, DriverQueue, Running, Used};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::Queue;

const MEMORY: usize = 4 << 20;
/// Where the rings are.
const RINGS: u64 = 0x1_0000;
/// Where buffers are.
const BUFFERS: u64 = 0x10_0000;
/// Bytes of each request's part of the buffers: the first half for its message.
const SLOT: u64 = 0x1_0000;
/// Most bytes of a message.
const MESSAGE_MAX: usize = 16 << 10;
/// An opcode with an answer (FUSE_GETATTR).
const GETATTR: u32 = 3;

/// A guest with a file system device.
struct Guest {
    memory: Arc<GuestMemory>,
    queues: [DriverQueue; 2],
    running: Running<Fs>,
}

/// The server's end of the socket.
struct Server(OwnedFd);

fn sockets() -> (OwnedFd, Server) {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (device, server) = pair.expect("a socket pair");
    (device, Server(server))
}

fn args(server: Option<OwnedFd>) -> FsArgs {
    FsArgs {
        tag: "src".into(),
        server,
        message_max: MESSAGE_MAX,
    }
}

impl Guest {
    fn new() -> (Guest, Server) {
        let (socket, server) = sockets();
        let device = Fs::new(args(Some(socket))).expect("a device");
        (Guest::with(device), server)
    }

    /// With a device that waits for answers as long as it takes when it stops.
    fn patient() -> (Guest, Server) {
        let (socket, server) = sockets();
        let mut device = Fs::new(args(Some(socket))).expect("a device");
        device.stop_within(testing::TIMEOUT);
        (Guest::with(device), server)
    }

    fn with(device: Fs) -> Guest {
        let memory = testing::memory(MEMORY);
        let next = RINGS + DriverQueue::ring_bytes(QUEUE_SIZE).next_multiple_of(16);
        let queue = |base| DriverQueue::new(memory.clone(), base, QUEUE_SIZE);
        let queues = [queue(RINGS), queue(next)];
        let rings = queues.each_ref().map(|queue| queue.device_queue(false));
        Guest::over(device, memory, queues, rings.into())
    }

    fn over(
        device: Fs,
        memory: Arc<GuestMemory>,
        queues: [DriverQueue; 2],
        rings: Vec<Queue>,
    ) -> Guest {
        let features = 1 << VIRTIO_RING_F_EVENT_IDX;
        let running = Running::start(device, &memory, rings, features);
        Guest {
            memory,
            queues,
            running,
        }
    }

    fn queue(&mut self, index: u16) -> &mut DriverQueue {
        &mut self.queues[usize::from(index)]
    }

    /// Offers buffers as they are.
    fn offer(&mut self, queue: u16, buffers: &[Buffer]) -> u16 {
        let head = self.queue(queue).add(buffers);
        self.running.ring(queue);
        head
    }

    /// Sends a request with this many bytes of room for its answer.
    fn send(&mut self, queue: u16, slot: u64, message: &[u8], room: u32) -> u16 {
        let place = BUFFERS + slot * SLOT;
        self.queue(queue).store(place, message);
        let mut buffers = vec![Buffer::readable(place, message.len() as u32)];
        if room > 0 {
            buffers.push(Buffer::writable(place + SLOT / 2, room));
        }
        self.offer(queue, &buffers)
    }

    /// What the device wrote for the request of a slot.
    fn answer(&mut self, slot: u64, used: Used) -> Vec<u8> {
        let mut bytes = vec![0; used.length as usize];
        let place = BUFFERS + slot * SLOT + SLOT / 2;
        self.queue(REQUEST_QUEUE).load(place, &mut bytes);
        bytes
    }

    /// Sends a request and returns its answer, which the device gives without the server.
    fn refused(&mut self, message: &[u8], room: u32) -> Vec<u8> {
        self.send(REQUEST_QUEUE, 0, message, room);
        let used = self.queue(REQUEST_QUEUE).wait_used();
        self.answer(0, used)
    }
}

impl Server {
    fn receive(&self) -> Vec<u8> {
        let mut message = vec![0; 2 * MESSAGE_MAX];
        let (_, length) =
            rustix::net::recv(&self.0, &mut message[..], RecvFlags::empty()).expect("a message");
        message.truncate(length);
        message
    }

    fn has_message(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).expect("the socket is open") > 0
    }

    fn send(&self, message: &[u8]) {
        rustix::net::send(&self.0, message, SendFlags::empty()).expect("the device receives");
    }

    /// Answers the request with the results.
    fn answer(&self, request: &[u8], results: &[u8]) {
        self.send(&out(id(request), 0, results));
    }
}

/// A request: `struct fuse_in_header` and arguments.
fn message(opcode: u32, id: u64, arguments: &[u8]) -> Vec<u8> {
    let mut message = vec![0; IN_HEADER];
    message[..4].copy_from_slice(&((IN_HEADER + arguments.len()) as u32).to_le_bytes());
    message[4..8].copy_from_slice(&opcode.to_le_bytes());
    message[8..16].copy_from_slice(&id.to_le_bytes());
    message.extend_from_slice(arguments);
    message
}

/// An answer: `struct fuse_out_header` and results.
fn out(id: u64, error: i32, results: &[u8]) -> Vec<u8> {
    let mut answer = ((OUT_HEADER + results.len()) as u32).to_le_bytes().to_vec();
    answer.extend_from_slice(&error.to_le_bytes());
    answer.extend_from_slice(&id.to_le_bytes());
    answer.extend_from_slice(results);
    answer
}

fn id(message: &[u8]) -> u64 {
    super::request::id_of(message)
}
