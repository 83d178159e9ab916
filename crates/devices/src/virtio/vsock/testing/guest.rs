//! A guest's socket driver: real rings in guest memory, doorbells that are signalled only when the
//! device asked for it, and enough of a kernel's socket layer to keep to the rules or to break
//! them.

use super::super::device::Vsock;
use super::super::packet::{
    HEADER_LEN, HOST_CID, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};
use super::super::rings::QUEUE_SIZES;
use crate::GuestMemory;
use crate::virtio::device::{Activation, ActiveQueue, VirtioDevice};
use crate::virtio::testing::{self, Buffer, DriverQueue, TIMEOUT, TestInterrupt, ThreadWorkers};
use std::collections::{HashMap, VecDeque};
use std::num::Wrapping;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(in super::super) const GUEST_CID: u64 = 3;
pub(in super::super) const EVENT_IDX: u64 = 1 << 29;

const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;
const RX_BUFFER: u32 = 4096;
const RX_BUFFERS: u64 = 0x10_0000;
const TX_BUFFERS: u64 = 0x20_0000;
const TX_BUFFER: u64 = 0x1_1000;
const EVENT_BUFFERS: u64 = 0x8_0000;
const EVENT_BUFFER: u32 = 8;
const ZEROS: u64 = 0x9_0000;
const MEMORY: usize = 16 << 20;

/// The ports of a connection: (host port, guest port).
pub(in super::super) type Ports = (u32, u32);

/// What the guest's kernel knows about a connection.
#[derive(Debug, Default)]
pub(in super::super) struct Socket {
    /// The host has answered the REQUEST.
    pub accepted: bool,
    /// The host has sent RST.
    pub reset: bool,
    /// Flags of the host's SHUTDOWN packets.
    pub shutdown: u32,
    /// Bytes that were received and not read yet.
    pub inbox: VecDeque<u8>,
    /// The `buf_alloc` that the host was told.
    pub window: u32,
    /// Bytes taken out of the inbox.
    pub taken: Wrapping<u32>,
    /// CREDIT_REQUESTs of the host.
    pub credit_requests: u32,
    told: Wrapping<u32>,
    sent: Wrapping<u32>,
    host_window: u32,
    host_taken: Wrapping<u32>,
}

impl Socket {
    pub(in super::super) fn credit(&self) -> usize {
        let unread = (self.sent - self.host_taken).0;
        self.host_window.saturating_sub(unread) as usize
    }
}

/// The guest with its device.
pub(in super::super) struct Guest {
    pub memory: Arc<GuestMemory>,
    pub device: Vsock,
    /// Its context id.
    pub cid: u64,
    pub interrupt: Arc<TestInterrupt>,
    pub sockets: HashMap<Ports, Socket>,
    /// REQUESTs of the host that were not answered.
    pub requests: VecDeque<Ports>,
    /// All other packets that were received, in order, without payloads.
    pub seen: Vec<Header>,
    /// The ids of received events.
    pub events: Vec<u32>,
    /// Whether the guest keeps to the rules, and expects the same of the device.
    pub honest: bool,
    /// Window of new sockets.
    pub window: u32,
    /// Whether receive and event buffers are returned to the device at once.
    pub restocks: bool,
    kept: VecDeque<u64>,
    features: u64,
    queues: [DriverQueue; 3],
    /// How many chains were ever offered, and how many when the device was last notified.
    added: [Wrapping<u16>; 3],
    kicked: [Wrapping<u16>; 3],
    doorbells: Vec<EventFd>,
    /// Descriptors in flight, and how many each chain has, in order.
    tx_in_flight: u16,
    tx_chains: VecDeque<u16>,
    tx_next: u64,
    /// The first descriptor of the next chain.
    tx_descriptor: u16,
    by_hand: bool,
}

/// The positions of the device's queues.
pub(in super::super) type Paused = Vec<Queue>;

impl Guest {
    /// A driver that has given the device all its buffers.
    pub(in super::super) fn new(device: Vsock, features: u64) -> Guest {
        let mut guest = Guest::without_buffers(device, features);
        guest.stock();
        guest
    }

    fn stock(&mut self) {
        for slot in 0..u64::from(QUEUE_SIZES[RX]) {
            self.add(RX, &[rx_buffer(slot)]);
        }
        for slot in 0..u64::from(QUEUE_SIZES[EVENT]) {
            self.add(EVENT, &[event_buffer(slot)]);
        }
    }

    /// A driver that has not given the device any buffers yet.
    pub(in super::super) fn without_buffers(device: Vsock, features: u64) -> Guest {
        let memory = testing::memory(MEMORY);
        let queue = |index: usize| {
            let base = 0x1000 + 0x4000 * index as u64;
            DriverQueue::new(memory.clone(), base, QUEUE_SIZES[index])
        };
        Guest {
            queues: [queue(RX), queue(TX), queue(EVENT)],
            memory: memory.clone(),
            device,
            cid: GUEST_CID,
            interrupt: TestInterrupt::new(),
            sockets: HashMap::new(),
            requests: VecDeque::new(),
            seen: Vec::new(),
            events: Vec::new(),
            honest: true,
            window: 256 * 1024,
            restocks: true,
            kept: VecDeque::new(),
            features,
            added: Default::default(),
            kicked: Default::default(),
            doorbells: (0..3)
                .map(|_| EventFd::new(EFD_NONBLOCK).expect("eventfd"))
                .collect(),
            tx_in_flight: 0,
            tx_chains: VecDeque::new(),
            tx_next: 0,
            tx_descriptor: 0,
            by_hand: false,
        }
    }

    /// Activates the device for the first time, with its thread.
    pub(in super::super) fn start(mut self) -> Guest {
        let queues = self.fresh_queues();
        self.activate(queues);
        self
    }

    /// Like `start`, without a thread: [`Guest::settle`] does the work.
    pub(in super::super) fn start_by_hand(mut self) -> Guest {
        self.by_hand = true;
        self.start()
    }

    /// Later activations have no thread.
    #[cfg(test)]
    pub(in super::super) fn by_hand(mut self) -> Guest {
        self.by_hand = true;
        self
    }

    pub(in super::super) fn fresh_queues(&self) -> Paused {
        let event_idx = self.features & EVENT_IDX != 0;
        let queues = self.queues.iter();
        queues.map(|queue| queue.device_queue(event_idx)).collect()
    }

    pub(in super::super) fn activate(&mut self, queues: Paused) {
        let active = (0u16..).zip(queues).map(|(index, queue)| {
            let doorbell = &self.doorbells[usize::from(index)];
            Some(ActiveQueue {
                index,
                queue,
                doorbell: doorbell.try_clone().expect("eventfd"),
            })
        });
        let activation = Activation {
            memory: self.memory.clone(),
            queues: active.collect(),
            interrupt: self.interrupt.clone(),
            features: self.features,
            workers: Arc::new(ThreadWorkers),
        };
        match self.by_hand {
            true => self.device.activate_by_hand(activation),
            false => self.device.activate(activation).expect("starts"),
        }
    }

    pub(in super::super) fn pause(&mut self) -> Paused {
        let queues = self.device.deactivate();
        queues.into_iter().map(|active| active.queue).collect()
    }

    /// The driver resets the device and starts again with empty rings.
    pub(in super::super) fn reset_driver(&mut self) {
        self.device.deactivate();
        for (index, queue) in (0u64..).zip(&mut self.queues) {
            let size = queue.size();
            *queue = DriverQueue::new(self.memory.clone(), 0x1000 + 0x4000 * index, size);
        }
        self.added = Default::default();
        self.kicked = Default::default();
        self.tx_in_flight = 0;
        self.tx_chains.clear();
        self.tx_descriptor = 0;
        self.kept.clear();
        self.sockets.clear();
        self.stock();
        let queues = self.fresh_queues();
        self.activate(queues);
    }

    fn add(&mut self, queue: usize, buffers: &[Buffer]) {
        self.queues[queue].add(buffers);
        self.added[queue] += Wrapping(1);
    }

    /// Signals the doorbell if the device asked for it (Virtio 1.3 §2.7.10).
    fn kick(&mut self, queue: usize) {
        let (old, new) = (self.kicked[queue], self.added[queue]);
        if old == new {
            return;
        }
        self.kicked[queue] = new;
        let rings = &self.queues[queue];
        let mut bytes = [0; 2];
        let wanted = if self.features & EVENT_IDX != 0 {
            rings.load(rings.used() + 4 + 8 * u64::from(rings.size()), &mut bytes);
            let event = Wrapping(u16::from_le_bytes(bytes));
            new - event - Wrapping(1) < new - old
        } else {
            rings.load(rings.used(), &mut bytes);
            bytes[0] & 1 == 0
        };
        if wanted {
            self.doorbells[queue].write(1).expect("rings");
        }
    }

    /// Sends buffers as one chain, unchecked.
    pub(in super::super) fn send_chain(&mut self, parts: &[&[u8]], writable: bool) {
        let room = self.queues[TX].size() - parts.len() as u16;
        let start = Instant::now();
        while self.tx_in_flight > room {
            // Continues as a kernel would: answers need receive buffers.
            self.pump();
            assert!(start.elapsed() < TIMEOUT, "no transmit buffer is returned");
        }
        // One slot per chain: as many as descriptors, so none is reused too early.
        let mut address = TX_BUFFERS + TX_BUFFER * (self.tx_next % u64::from(QUEUE_SIZES[TX]));
        self.tx_next += 1;
        let mut buffers = Vec::new();
        for part in parts {
            self.queues[TX].store(address, part);
            buffers.push(Buffer {
                address,
                length: part.len() as u32,
                writable,
            });
            address += part.len() as u64;
        }
        self.send_buffers(&buffers);
    }

    /// Sends descriptors unchecked.
    pub(in super::super) fn send_buffers(&mut self, buffers: &[Buffer]) {
        self.add(TX, buffers);
        self.tx_in_flight += buffers.len() as u16;
        self.tx_chains.push_back(buffers.len() as u16);
        self.tx_descriptor = (self.tx_descriptor + buffers.len() as u16) % self.queues[TX].size();
        self.kick(TX);
    }

    /// Sends a packet, header and payload in one buffer as Linux does.
    pub(in super::super) fn send(&mut self, header: Header, payload: &[u8]) {
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend_from_slice(payload);
        self.send_chain(&[&bytes], false);
    }

    /// Whether the transmit queue has space for this many descriptors.
    pub(in super::super) fn has_room(&self, descriptors: u16) -> bool {
        self.tx_in_flight + descriptors <= self.queues[TX].size()
    }

    /// Sends a packet if there is space now.
    pub(in super::super) fn try_send(&mut self, header: Header) -> bool {
        self.pump();
        let room = self.tx_in_flight < self.queues[TX].size();
        if room {
            self.send(header, &[]);
        }
        room
    }

    /// Sends a chain of two descriptors that point at each other.
    pub(in super::super) fn send_loop(&mut self) {
        let part = Buffer::readable(ZEROS, 64);
        self.send_buffers(&[part, part]);
        let (last, first) = (self.tx_descriptor - 1, self.tx_descriptor - 2);
        let queue = &self.queues[TX];
        queue.write_descriptor(queue.descriptors(), last, part, testing::NEXT, first);
    }

    /// Offers a head that does not exist. The device can't return it.
    pub(in super::super) fn offer_wild_head(&mut self, head: u16) {
        self.queues[TX].offer(head);
        self.added[TX] += Wrapping(1);
        self.kick(TX);
    }

    /// Claims to have added more chains than the ring has.
    pub(in super::super) fn break_transmit_ring(&mut self) {
        self.added[TX] += Wrapping(1000);
        self.queues[TX].set_avail_index(self.added[TX].0);
        self.doorbells[TX].write(1).expect("rings");
    }

    /// Adds receive buffers, unchecked.
    pub(in super::super) fn add_receive_buffers(&mut self, buffers: &[Buffer]) {
        for buffer in buffers {
            self.add(RX, &[*buffer]);
        }
        self.kick(RX);
    }

    /// How many event buffers were ever returned.
    #[cfg(test)]
    pub(in super::super) fn event_buffers_returned(&self) -> u16 {
        self.queues[EVENT].used_index()
    }

    /// How many receive buffers were ever returned.
    pub(in super::super) fn receive_buffers_returned(&self) -> u16 {
        self.queues[RX].used_index()
    }

    /// A correct header for these ports.
    pub(in super::super) fn header(&mut self, ports: Ports, op: Op) -> Header {
        let window = self.window;
        let socket = self.sockets.entry(ports).or_insert_with(|| Socket {
            window,
            ..Socket::default()
        });
        socket.told = socket.taken;
        Header {
            src_cid: self.cid,
            dst_cid: HOST_CID,
            src_port: ports.1,
            dst_port: ports.0,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: socket.window,
            fwd_cnt: socket.taken.0,
            ..Header::default()
        }
    }

    /// Sends a packet without payload.
    pub(in super::super) fn send_op(&mut self, ports: Ports, op: Op, flags: u32) {
        let header = Header {
            flags,
            ..self.header(ports, op)
        };
        self.send(header, &[]);
    }

    /// Sends bytes without regard to credit.
    pub(in super::super) fn push(&mut self, ports: Ports, payload: &[u8]) {
        let header = Header {
            len: payload.len() as u32,
            ..self.header(ports, Op::Rw)
        };
        self.sockets.get_mut(&ports).expect("made above").sent += Wrapping(header.len);
        self.send(header, payload);
    }

    /// Sends as much of `payload`, up to 64 KiB, as credit allows; returns how many bytes.
    pub(in super::super) fn push_some(&mut self, ports: Ports, payload: &[u8]) -> usize {
        let credit = self.sockets.get(&ports).map_or(0, Socket::credit);
        let count = payload.len().min(credit).min(64 * 1024);
        if count > 0 {
            self.push(ports, &payload[..count]);
        }
        count
    }

    /// Processes everything that the device returned.
    pub(in super::super) fn pump(&mut self) {
        if self.by_hand {
            self.device.step();
        }
        self.take_returned();
    }

    /// The same, without a turn of the device.
    pub(in super::super) fn take_returned(&mut self) {
        while self.queues[TX].next_used().is_some() {
            self.tx_in_flight -= self.tx_chains.pop_front().expect("one per chain");
        }
        while let Some(used) = self.queues[RX].next_used() {
            let slot = u64::from(used.head);
            let mut bytes = vec![0; used.length as usize];
            self.queues[RX].load(RX_BUFFERS + slot * u64::from(RX_BUFFER), &mut bytes);
            match self.restocks {
                true => self.add(RX, &[rx_buffer(slot)]),
                false => self.kept.push_back(slot),
            }
            if let Some((header, payload)) = bytes.split_first_chunk::<HEADER_LEN>() {
                self.take_packet(Header::from_bytes(header), payload);
            } else {
                assert_eq!(used.length, 0, "half a header");
            }
        }
        self.kick(RX);
        while let Some(used) = self.queues[EVENT].next_used() {
            let mut id = [0; 4];
            assert_eq!(used.length, 4);
            let address = EVENT_BUFFERS + u64::from(used.head) * u64::from(EVENT_BUFFER);
            self.queues[EVENT].load(address, &mut id);
            self.events.push(u32::from_le_bytes(id));
            if self.restocks {
                self.add(EVENT, &[event_buffer(u64::from(used.head))]);
            }
        }
        self.kick(EVENT);
    }

    /// Gives the device the receive buffers that were kept because of `restocks`.
    pub(in super::super) fn restock(&mut self) {
        self.restocks = true;
        while let Some(slot) = self.kept.pop_front() {
            self.add(RX, &[rx_buffer(slot)]);
        }
        self.kick(RX);
    }

    /// Gives the device the event buffer that was kept because of `restocks`.
    pub(in super::super) fn restock_event(&mut self, slot: u64) {
        self.add(EVENT, &[event_buffer(slot)]);
        self.kick(EVENT);
    }

    fn take_packet(&mut self, header: Header, payload: &[u8]) {
        assert_eq!(header.dst_cid, self.cid);
        assert_eq!(header.len as usize, payload.len());
        let ports = (header.src_port, header.dst_port);
        self.seen.push(header);
        let window = self.window;
        let socket = self.sockets.entry(ports).or_insert_with(|| Socket {
            window,
            ..Socket::default()
        });
        socket.host_window = header.buf_alloc;
        socket.host_taken = Wrapping(header.fwd_cnt);
        match Op::from_number(header.op).expect("the device sends no nonsense") {
            Op::Request => self.requests.push_back(ports),
            Op::Response => socket.accepted = true,
            Op::Rst => socket.reset = true,
            Op::Shutdown => socket.shutdown |= header.flags,
            Op::Rw => {
                socket.inbox.extend(payload);
                assert!(
                    !self.honest || socket.inbox.len() <= socket.window as usize,
                    "the device keeps to the guest's credit"
                );
            }
            Op::CreditUpdate => {}
            Op::CreditRequest => {
                socket.credit_requests += 1;
                if self.honest {
                    self.send_op(ports, Op::CreditUpdate, 0);
                }
            }
        }
    }

    /// Takes the bytes that came for a socket, and updates the host's credit as Linux does: when
    /// much of the window is used up.
    pub(in super::super) fn read(&mut self, ports: Ports) -> Vec<u8> {
        self.pump();
        let Some(socket) = self.sockets.get_mut(&ports) else {
            return Vec::new();
        };
        let bytes: Vec<u8> = socket.inbox.drain(..).collect();
        socket.taken += Wrapping(bytes.len() as u32);
        let unknown = (socket.taken - socket.told).0;
        if unknown > socket.window / 2 {
            self.send_op(ports, Op::CreditUpdate, 0);
        }
        bytes
    }

    /// Pumps until `done`.
    ///
    /// # Panics
    ///
    /// If it takes longer than [`TIMEOUT`].
    pub(in super::super) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Guest) -> bool) {
        let start = Instant::now();
        loop {
            self.pump();
            if done(self) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "waited in vain: {what}");
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Without a thread: does turns until nothing changes.
    pub(in super::super) fn settle(&mut self) {
        assert!(self.by_hand);
        for _ in 0..8 {
            self.pump();
        }
    }

    pub(in super::super) fn socket(&self, ports: Ports) -> &Socket {
        &self.sockets[&ports]
    }

    /// Connects to a host program, whose socket must exist.
    pub(in super::super) fn connect(&mut self, ports: Ports) {
        self.send_op(ports, Op::Request, 0);
        self.until("RESPONSE", |guest| guest.sockets[&ports].accepted);
    }

    /// Accepts the next REQUEST of the host to `guest_port`.
    pub(in super::super) fn accept(&mut self, guest_port: u32) -> Ports {
        self.until("REQUEST", |guest| !guest.requests.is_empty());
        let ports = self.requests.pop_front().expect("a request");
        assert_eq!(ports.1, guest_port);
        self.send_op(ports, Op::Response, 0);
        ports
    }

    /// Closes a connection as Linux does, and waits for the RST.
    pub(in super::super) fn close(&mut self, ports: Ports) {
        self.send_op(ports, Op::Shutdown, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
        self.until("RST", |guest| guest.sockets[&ports].reset);
    }
}

fn rx_buffer(slot: u64) -> Buffer {
    Buffer::writable(RX_BUFFERS + slot * u64::from(RX_BUFFER), RX_BUFFER)
}

fn event_buffer(slot: u64) -> Buffer {
    Buffer::writable(EVENT_BUFFERS + slot * u64::from(EVENT_BUFFER), EVENT_BUFFER)
}
