//! A network driver for the tests, and the host at the other end.

use crate::GuestMemory;
use crate::virtio::device::VirtioDevice;
use crate::virtio::net::{Backend, Mac, Net, NetArgs, header};
use crate::virtio::queue::RateLimit;
use crate::virtio::testing::{Buffer, DriverQueue, Running, TIMEOUT, Used, memory};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use virtio_bindings::virtio_net::*;

pub const MEMORY_BYTES: u64 = 16 << 20;
const RINGS: u64 = 0x1000;
const RING_ROOM: u64 = 0x4000;
/// Address of the receive buffers.
pub const RECEIVE: u64 = 0x10_0000;
/// Address of the frames to send.
pub const SEND: u64 = 0x80_0000;
pub const COMMAND: u64 = 0xf0_0000;

pub const MAC: Mac = Mac([0x02, 0x4a, 0x46, 0, 0, 1]);
pub const EVENT_IDX: u64 = 1 << 29;
pub const MERGEABLE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
pub const SEGMENTS: u64 = 1 << VIRTIO_NET_F_GUEST_TSO4 | 1 << VIRTIO_NET_F_GUEST_CSUM;
pub const CONTROL: u64 = 1 << VIRTIO_NET_F_CTRL_VQ;
/// The features that Linux negotiates, except several pairs.
pub const USUAL: u64 = MERGEABLE
    | SEGMENTS
    | CONTROL
    | EVENT_IDX
    | 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_ANNOUNCE
    | 1 << VIRTIO_NET_F_STATUS
    | 1 << VIRTIO_NET_F_MAC;

/// A frame of `bytes` bytes from the device's address; each byte of its packet is `fill`.
pub fn frame(fill: u8, bytes: usize) -> Vec<u8> {
    let mut frame = vec![fill; bytes];
    frame[..6].copy_from_slice(&[0xff; 6]);
    frame[6..12].copy_from_slice(&MAC.0);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame
}

/// A frame after an empty virtio header.
pub fn with_header(frame: &[u8]) -> Vec<u8> {
    [&[0; header::BYTES][..], frame].concat()
}

pub fn args(backend: Backend) -> NetArgs {
    NetArgs {
        mac: MAC,
        mtu: None,
        guard: None,
        receive_limit: RateLimit::default(),
        send_limit: RateLimit::default(),
        backend,
    }
}

/// A device on datagrams, with the host's sockets.
pub fn on_datagrams(pairs: usize) -> (Net, Vec<UnixDatagram>) {
    let (ours, theirs) = (0..pairs)
        .map(|_| UnixDatagram::pair().unwrap())
        .unzip::<_, _, Vec<_>, Vec<_>>();
    for host in &theirs {
        host.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    (Net::new(args(Backend::Datagrams(ours))).unwrap(), theirs)
}

/// A guest with a network device.
pub struct Guest {
    pub device: Running<Net>,
    pub memory: Arc<GuestMemory>,
    /// All queues in their order.
    pub queues: Vec<DriverQueue>,
}

impl Guest {
    pub fn start(net: Net, features: u64) -> Guest {
        Guest::with_queue_size(net, features, u16::MAX)
    }

    /// A guest with queues of at most `size` entries.
    pub fn with_queue_size(net: Net, features: u64, size: u16) -> Guest {
        let memory = memory(MEMORY_BYTES as usize);
        let sizes = net.queue_max_sizes().iter();
        let queues = (0..).zip(sizes).map(|(number, most)| {
            let place = RINGS + RING_ROOM * number;
            DriverQueue::new(memory.clone(), place, size.min(*most))
        });
        let queues = queues.collect();
        Guest::over(net, features, memory, queues)
    }

    /// A guest with queues that were used before.
    pub fn over(
        net: Net,
        features: u64,
        memory: Arc<GuestMemory>,
        queues: Vec<DriverQueue>,
    ) -> Guest {
        let event_idx = features & EVENT_IDX != 0;
        let device = queues.iter().map(|queue| queue.device_queue(event_idx));
        Guest {
            device: Running::start(net, &memory, device.collect(), features),
            memory,
            queues,
        }
    }

    /// Offers `count` buffers of `bytes` bytes each, adjacent in memory.
    pub fn offer_buffers(&mut self, count: usize, bytes: u32) {
        for number in 0..count {
            let address = RECEIVE + number as u64 * u64::from(bytes);
            self.queues[0].add(&[Buffer::writable(address, bytes)]);
        }
        self.device.ring(0);
    }

    /// Waits for a frame, and returns it with its header. Its buffers must have been offered in
    /// order.
    pub fn wait_received(&mut self) -> Vec<u8> {
        let first = self.queues[0].wait_used();
        let mut whole = self.contents(first);
        let buffers = u16::from_le_bytes([whole[10], whole[11]]);
        for _ in 1..buffers {
            // All buffers of a frame are returned at once.
            let next = self.queues[0].next_used().expect("another buffer");
            whole.extend(self.contents(next));
        }
        whole
    }

    /// The contents of the first buffer of a chain.
    fn contents(&self, used: Used) -> Vec<u8> {
        let table = self.queues[0].descriptors();
        let mut address = [0; 8];
        self.queues[0].load(table + 16 * u64::from(used.head), &mut address);
        let mut bytes = vec![0; used.length as usize];
        self.queues[0].load(u64::from_le_bytes(address), &mut bytes);
        bytes
    }

    /// Offers `bytes` (a header and a frame) for sending, in buffers of these lengths and one for
    /// the rest.
    pub fn send_in(&mut self, bytes: &[u8], lengths: &[u32]) -> u16 {
        self.queues[1].store(SEND, bytes);
        let mut buffers = Vec::new();
        let mut at = 0;
        for length in lengths {
            buffers.push(Buffer::readable(SEND + u64::from(at), *length));
            at += length;
        }
        let rest = bytes.len() as u32 - at;
        buffers.push(Buffer::readable(SEND + u64::from(at), rest));
        let head = self.queues[1].add(&buffers);
        self.device.ring(1);
        head
    }

    /// Offers `bytes` in one buffer and waits until the device has taken it.
    pub fn send(&mut self, bytes: &[u8]) {
        let head = self.send_in(bytes, &[]);
        let used = self.queues[1].wait_used();
        assert_eq!((used.head, used.length), (head.into(), 0));
    }

    /// Sends a command; returns the answer.
    pub fn command(&mut self, bytes: &[u8]) -> u8 {
        let control = self.queues.len() - 1;
        let (answer, queue) = (COMMAND + 64, &mut self.queues[control]);
        queue.store(COMMAND, bytes);
        queue.store(answer, &[0xee]);
        let (class, data) = (2.min(bytes.len() as u32), bytes.len() as u32);
        queue.add(&[
            Buffer::readable(COMMAND, class),
            Buffer::readable(COMMAND + u64::from(class), data - class),
            Buffer::writable(answer, 1),
        ]);
        self.device.ring(control as u16);
        assert_eq!(self.queues[control].wait_used().length, 1);
        let mut byte = [0];
        self.queues[control].load(answer, &mut byte);
        byte[0]
    }

    /// The configuration space, as the driver reads it.
    pub fn config(&self) -> [u8; 12] {
        let mut config = [0; 12];
        self.device.device.read_config(0, &mut config);
        config
    }
}

/// What the host received, with its virtio header.
pub fn received_by(host: &UnixDatagram) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 17];
    let count = host.recv(&mut bytes).unwrap();
    bytes.truncate(count);
    bytes
}
